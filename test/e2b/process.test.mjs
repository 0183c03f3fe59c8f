// Commands and terminals with the unmodified JavaScript SDK, beside what
// first-light.test.mjs does: late and second readers, halves of characters.
import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import { CommandExitError, NotFoundError, Sandbox } from 'e2b'

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
const bytes = (text) => new TextEncoder().encode(text)

describe('one sandbox', () => {
  let sbx
  before(async () => {
    sbx = await Sandbox.create({ timeoutMs: 120_000, envs: { A: 'create', B: 'create' } })
  })
  after(async () => {
    await sbx?.kill()
  })

  test('a character in two halves reaches the callback whole', async () => {
    const out = []
    const result = await sbx.commands.run(`printf '\\xf0\\x9f'; sleep 0.3; printf '\\x9c\\x81'`, { onStdout: (s) => out.push(s) })
    assert.equal(result.stdout, '🜁')
    assert.equal(out.join(''), '🜁')
  })

  test('characters of many bytes, much of them', async () => {
    let out = ''
    const result = await sbx.commands.run(`python3 -c "print('é🜁' * 100_000, end='')"`, { onStdout: (s) => (out += s) })
    assert.equal(result.stdout, 'é🜁'.repeat(100_000))
    assert.equal(out, result.stdout)
  })

  test('envs of a command are before those of create', async () => {
    assert.equal((await sbx.commands.run('echo $A $B', { envs: { B: 'run' } })).stdout, 'create run\n')
  })

  test('the fields of a failure', async () => {
    await assert.rejects(sbx.commands.run('echo out; echo err >&2; exit 7'), (e) => {
      assert.ok(e instanceof CommandExitError)
      assert.deepEqual([e.exitCode, e.stdout, e.stderr, e.error], [7, 'out\n', 'err\n', 'exit status 7'])
      assert.equal(e.message, 'exit status 7')
      return true
    })
    await assert.rejects(sbx.commands.run('kill -9 $$'), (e) => e.exitCode === -1 && e.error === 'signal: killed')
    await assert.rejects(sbx.commands.run('no-such-program'), (e) => e.exitCode === 127 && /not found/.test(e.stderr))
  })

  test('a handle: pid, output so far, exit code', async () => {
    const handle = await sbx.commands.run('echo one; read x; echo two >&2; exit 0', { background: true, stdin: true })
    while (handle.stdout !== 'one\n') await sleep(20)
    assert.equal(handle.exitCode, undefined)
    await handle.sendStdin('\n')
    const result = await handle.wait()
    assert.deepEqual([handle.stdout, handle.stderr, handle.exitCode, result.exitCode], ['one\n', 'two\n', 0, 0])
  })

  test('a late connect still gets the end', async () => {
    const handle = await sbx.commands.run('sleep 0.2; exit 5', { background: true })
    await handle.disconnect()
    await sleep(500)
    const late = await sbx.commands.connect(handle.pid)
    await assert.rejects(late.wait(), (e) => e instanceof CommandExitError && e.exitCode === 5)
  })

  test('a second reader, and kill by the handle', async () => {
    const first = await sbx.commands.run('read x; echo got $x; sleep 60', { background: true, stdin: true })
    let seen = ''
    const second = await sbx.commands.connect(first.pid, { onStdout: (s) => (seen += s) })
    await second.sendStdin('it\n')
    while (!seen.includes('got it\n')) await sleep(20)
    assert.equal(await second.kill(), true)
    await assert.rejects(first.wait(), CommandExitError)
    await assert.rejects(sbx.commands.sendStdin(first.pid, 'x'), NotFoundError)
    await assert.rejects(sbx.commands.closeStdin(first.pid), NotFoundError)
  })

  test('input: bytes, its end, and none', async () => {
    const handle = await sbx.commands.run('sha256sum', { background: true, stdin: true })
    await sbx.commands.sendStdin(handle.pid, new Uint8Array([0, 255, 10]))
    await sbx.commands.closeStdin(handle.pid)
    assert.equal((await handle.wait()).stdout, '712450d3c4a79eea9509e75dc1dacdeff58034df538536cfae2da882bd8a0c50  -\n')
    const none = await sbx.commands.run('sleep 60', { background: true })
    await assert.rejects(sbx.commands.sendStdin(none.pid, 'x'), /stdin is not enabled/)
    await none.kill()
    assert.equal((await sbx.commands.run('wc -c')).stdout, '0\n')
  })

  test('a terminal: create, resize, input, cwd, envs, user', async () => {
    let seen = ''
    const pty = await sbx.pty.create({ cols: 80, rows: 24, cwd: '/tmp', envs: { IN: 'pty' }, user: 'root', onData: (d) => (seen += new TextDecoder().decode(d)) })
    await sbx.pty.resize(pty.pid, { cols: 100, rows: 30 })
    await sbx.pty.sendInput(pty.pid, bytes('stty size; pwd; echo $IN $(whoami) $TERM; exit 3\n'))
    await assert.rejects(pty.wait(), (e) => e instanceof CommandExitError && e.exitCode === 3)
    for (const want of ['30 100\r\n', '/tmp\r\n', 'pty root xterm-256color\r\n']) assert.ok(seen.includes(want), seen)
  })

  test('a terminal: connect, kill', async () => {
    const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: () => {} })
    let seen = ''
    const second = await sbx.pty.connect(pty.pid, { onData: (d) => (seen += new TextDecoder().decode(d)) })
    await sbx.pty.sendInput(second.pid, bytes('echo $((6*7))\n'))
    while (!seen.includes('42')) await sleep(20)
    assert.equal(await sbx.pty.kill(pty.pid), true)
    await assert.rejects(second.wait(), CommandExitError)
    assert.equal(await sbx.pty.kill(pty.pid), false)
  })

  test('metrics', async () => {
    const busy = await sbx.commands.run('while :; do :; done', { background: true })
    let metrics = []
    for (let i = 0; i < 60 && !metrics.some((m) => m.cpuUsedPct > 5); i++) {
      await sleep(500)
      metrics = await sbx.getMetrics()
    }
    await busy.kill()
    const last = metrics.at(-1)
    assert.ok(last.cpuUsedPct >= 0 && last.cpuUsedPct <= 100, JSON.stringify(last))
    assert.equal(last.cpuCount, 2)
    assert.ok(last.memUsed > 1 << 20)
    assert.equal(last.memTotal, 512 * 2 ** 20)
    assert.equal(last.diskTotal, 2 ** 30)
    assert.ok(Math.abs(last.timestamp - Date.now()) < 60_000)
    assert.deepEqual(await Sandbox.getMetrics(sbx.sandboxId, { start: new Date(0), end: new Date(1000) }), [])
  })
})
