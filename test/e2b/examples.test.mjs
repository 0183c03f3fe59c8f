// What E2B's documentation shows its users, with the unmodified SDK and as
// near as may be to how it is written there. It needs a domain: some of the
// examples open ports.
import assert from 'node:assert/strict'
import { writeFileSync, readFileSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'
import './resolve.mjs'

const { ALL_TRAFFIC, CommandExitError, E2B, Sandbox, Template } = await import('e2b')
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

// example runs one with a sandbox that ends with it.
const example = (name, run, opts) =>
  test(name, async () => {
    const sandbox = await Sandbox.create(opts)
    try {
      await run(sandbox)
    } finally {
      await sandbox.kill()
    }
  })

example('start a sandbox and run commands', async (sandbox) => {
  const result = await sandbox.commands.run('echo "Hello from E2B!"')
  assert.equal(result.stdout, 'Hello from E2B!\n')
})

test('bind the configuration to a client', async () => {
  const client = new E2B({ apiKey: process.env.E2B_API_KEY, domain: process.env.E2B_DOMAIN })
  const sandbox = await client.Sandbox.create()
  assert.equal(await client.Template.exists('my-template'), false)
  const { Sandbox: Bound } = client
  const paginator = Bound.list()
  assert.ok((await paginator.nextItems()).some((s) => s.sandboxId === sandbox.sandboxId))
  await sandbox.kill()
})

test('create from a template, is it running, kill', async () => {
  const sandbox = await Sandbox.create('base')
  assert.equal(await sandbox.isRunning(), true)
  await sandbox.kill()
  assert.equal(await sandbox.isRunning(), false)
})

test('lifecycle: timeout, info, connect', async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 60_000 })
  await sandbox.setTimeout(30_000)
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.ok(info.endAt - Date.now() <= 30_500)
  const sandboxId = sandbox.sandboxId
  const sameSandbox = await Sandbox.connect(sandboxId)
  assert.equal(sameSandbox.sandboxId, sandboxId)
  await Sandbox.kill(sandboxId)
})

test('metadata and list', async () => {
  const sandbox = await Sandbox.create({ metadata: { env: 'dev', app: 'my-app', userId: '123' } })
  const paginator = Sandbox.list({ query: { metadata: { userId: '123' }, state: ['running'] }, limit: 10 })
  const all = []
  while (paginator.hasNext) all.push(...(await paginator.nextItems()))
  assert.deepEqual(all.find((s) => s.sandboxId === sandbox.sandboxId).metadata, { env: 'dev', app: 'my-app', userId: '123' })
  await sandbox.kill()
})

example('metrics', async (sandbox) => {
  let metrics = []
  for (let i = 0; i < 60 && !metrics.length; i++) {
    await sleep(500)
    metrics = await sandbox.getMetrics()
  }
  assert.ok('cpuUsedPct' in metrics[0] && 'memUsed' in metrics[0] && 'diskTotal' in metrics[0])
})

example('environment variables: of the sandbox, of a command, of a shell', async (sandbox) => {
  assert.equal((await sandbox.commands.run('echo $MY_VAR')).stdout, 'my_value\n')
  assert.equal((await sandbox.commands.run('echo $MY_VAR', { envs: { MY_VAR: '123' } })).stdout, '123\n')
  assert.equal((await sandbox.commands.run('MY_VAR=456; echo $MY_VAR')).stdout, '456\n')
  assert.equal((await sandbox.commands.run('echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID')).stdout, `true ${sandbox.sandboxId} base\n`)
}, { envs: { MY_VAR: 'my_value' } })

example('commands: stream, background, kill', async (sandbox) => {
  const seen = []
  await sandbox.commands.run('echo hello; sleep 0.1; echo world', { onStdout: (data) => seen.push(data), onStderr: (data) => assert.fail(data) })
  assert.equal(seen.join(''), 'hello\nworld\n')
  const command = await sandbox.commands.run('echo hello; sleep 10; echo world', { background: true, onStdout: () => {} })
  await command.kill()
  await assert.rejects(command.wait(), CommandExitError)
})

example('files: read, write, several, list', async (sandbox) => {
  await sandbox.files.write('/home/user/my-file', 'hello')
  assert.equal(await sandbox.files.read('/home/user/my-file'), 'hello')
  await sandbox.files.write([{ path: 'a/one', data: 'one' }, { path: 'a/two', data: 'two' }])
  const content = await sandbox.files.list('/home/user/a')
  assert.deepEqual(content.map((e) => e.name), ['one', 'two'])
  const info = await sandbox.files.getInfo('a/one')
  assert.deepEqual([info.name, info.type, info.path, info.size, info.mode, info.permissions, info.owner, info.group], [
    'one', 'file', '/home/user/a/one', 3, 0o644, '-rw-r--r--', 'user', 'user',
  ])
  await sandbox.files.makeDir('test_dir')
  assert.equal((await sandbox.files.getInfo('test_dir')).type, 'dir')
})

example('upload and download a file of this machine', async (sandbox) => {
  const dir = mkdtempSync(join(tmpdir(), 'airlock-example-'))
  try {
    writeFileSync(join(dir, 'local'), 'local content')
    const content = readFileSync(join(dir, 'local'))
    await sandbox.files.write('/home/user/my-file', content)
    writeFileSync(join(dir, 'back'), await sandbox.files.read('/home/user/my-file'))
    assert.equal(readFileSync(join(dir, 'back'), 'utf8'), 'local content')
  } finally {
    rmSync(dir, { recursive: true })
  }
})

example('upload and download by signed URLs', async (sandbox) => {
  const publicUploadUrl = await sandbox.uploadUrl('demo.txt', { useSignatureExpiration: 10_000 })
  const form = new FormData()
  form.append('file', new Blob(['file content'], { type: 'text/plain' }), 'demo.txt')
  assert.equal((await fetch(publicUploadUrl, { method: 'POST', body: form })).status, 200)
  const publicUrl = await sandbox.downloadUrl('demo.txt', { useSignatureExpiration: 10_000 })
  assert.equal(await (await fetch(publicUrl)).text(), 'file content')
}, { secure: true })

example('a terminal', async (sandbox) => {
  let seen = ''
  const terminal = await sandbox.pty.create({
    cols: 80,
    rows: 24,
    onData: (data) => (seen += new TextDecoder().decode(data)),
    envs: { MY_VAR: 'hello' },
    cwd: '/home/user',
    timeoutMs: 0,
  })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('echo "I say $MY_VAR"\n'))
  while (!seen.includes('I say hello\r\n')) await sleep(20)
  await sandbox.pty.resize(terminal.pid, { cols: 120, rows: 40 })
  await terminal.disconnect()
  const again = await sandbox.pty.connect(terminal.pid, { onData: (data) => (seen += new TextDecoder().decode(data)) })
  await sandbox.pty.sendInput(again.pid, new TextEncoder().encode('stty size; exit\n'))
  await again.wait()
  assert.match(seen, /40 120/)
  assert.equal(await sandbox.pty.kill(terminal.pid), false)
})

example('the host of a port', async (sandbox) => {
  await sandbox.commands.run('python3 -m http.server 3000', { background: true })
  const url = `https://${sandbox.getHost(3000)}`
  let reply
  for (let i = 0; i < 100 && !reply?.ok; i++) {
    await sleep(100)
    reply = await fetch(url)
  }
  assert.match(await reply.text(), /Directory listing/)
})

example('restrict public access', async (sandbox) => {
  const url = `https://${sandbox.getHost(8080)}`
  await sandbox.commands.run('python3 -m http.server 8080', { background: true })
  assert.equal((await fetch(url)).status, 403)
  let status
  for (let i = 0; i < 100 && status !== 200; i++) {
    await sleep(100)
    status = (await fetch(url, { headers: { 'e2b-traffic-access-token': sandbox.trafficAccessToken } })).status
  }
  assert.equal(status, 200)
}, { network: { allowPublicTraffic: false } })

example('no way to the internet', async (sandbox) => {
  await assert.rejects(sandbox.commands.run('exec 3<>/dev/tcp/8.8.8.8/53'), CommandExitError)
}, { allowInternetAccess: false, network: { denyOut: [ALL_TRAFFIC] } })

test('a template, described', async () => {
  const template = Template().fromBaseImage().setEnvs({ HELLO: 'Hello' }).runCmd('echo $HELLO').setStartCmd('sleep 1', 'true')
  assert.match(Template.toDockerfile(template), /RUN echo \$HELLO/)
  assert.match(await Template.toJSON(template), /echo \$HELLO/)
})
