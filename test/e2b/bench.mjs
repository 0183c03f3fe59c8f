// What test/bench measures of the unmodified SDK. It makes as many sandboxes
// as its argument says; then each line on standard input is a command:
// "run N K" is N clients at the same time, each of which calls
// commands.run('true') in a sandbox of its own K times, one after the other,
// and the answer is how many milliseconds all of it took.
import { createInterface } from 'node:readline'
import { Sandbox } from 'e2b'

const sandboxes = []
for (let i = 0; i < Number(process.argv[2]); i++) {
  sandboxes.push(await Sandbox.create({ timeoutMs: 600_000 }))
}
console.log('ready')
for await (const line of createInterface({ input: process.stdin })) {
  const [, n, times] = line.split(' ')
  const start = performance.now()
  await Promise.all(sandboxes.slice(0, Number(n)).map(async (s) => {
    for (let i = 0; i < Number(times); i++) await s.commands.run('true')
  }))
  console.log(performance.now() - start)
}
await Promise.all(sandboxes.map((s) => s.kill()))
