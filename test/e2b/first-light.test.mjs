// The unmodified E2B SDKs against a running Airlock. It reads E2B_API_URL,
// E2B_SANDBOX_URL and E2B_API_KEY, as the SDKs do.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { after, before, describe, test } from 'node:test'
import {
  AuthenticationError,
  CommandExitError,
  FileNotFoundError,
  InvalidArgumentError,
  NotFoundError,
  Sandbox,
  SandboxError,
  TimeoutError,
} from 'e2b'
import { Sandbox as CodeInterpreter } from '@e2b/code-interpreter'

for (const name of ['E2B_API_URL', 'E2B_SANDBOX_URL', 'E2B_API_KEY']) {
  assert.ok(process.env[name], `${name} is not set`)
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
const sha = (bytes) => createHash('sha256').update(bytes).digest('hex')

describe('one sandbox', () => {
  let sbx
  before(async () => {
    sbx = await Sandbox.create({ timeoutMs: 120_000, metadata: { suite: 'first light', 'a b': 'c&d=e' }, envs: { GLOBAL: 'from create' } })
  })
  after(async () => {
    await sbx?.kill()
  })

  test('a command, its output and its callbacks', async () => {
    const out = []
    const err = []
    const result = await sbx.commands.run('echo one; echo two >&2; printf "é…🜁"', { onStdout: (s) => out.push(s), onStderr: (s) => err.push(s) })
    assert.equal(result.exitCode, 0)
    assert.equal(result.stdout, 'one\né…🜁')
    assert.equal(result.stderr, 'two\n')
    assert.equal(out.join(''), result.stdout)
    assert.equal(err.join(''), result.stderr)
  })

  test('an exit code', async () => {
    await assert.rejects(sbx.commands.run('echo partial; exit 3'), (e) => {
      assert.ok(e instanceof CommandExitError)
      assert.equal(e.exitCode, 3)
      assert.equal(e.stdout, 'partial\n')
      return true
    })
  })

  test('no byte of much output is lost', async () => {
    const result = await sbx.commands.run('seq 1 300000')
    assert.equal(result.stdout.length, 1_988_895)
    assert.ok(result.stdout.endsWith('\n299999\n300000\n'))
  })

  test('envs and cwd', async () => {
    const result = await sbx.commands.run('echo "$GLOBAL|$MINE|$E2B_SANDBOX|$E2B_SANDBOX_ID"; pwd', { envs: { MINE: 'from run' }, cwd: '/tmp' })
    assert.equal(result.stdout, `from create|from run|true|${sbx.sandboxId}\n/tmp\n`)
    await assert.rejects(sbx.commands.run('true', { cwd: '/no/such/dir' }), (e) => e instanceof InvalidArgumentError && /does not exist/.test(e.message))
  })

  test('users', async () => {
    assert.equal((await sbx.commands.run('whoami; pwd')).stdout, 'user\n/home/user\n')
    assert.equal((await sbx.commands.run('whoami; id -u', { user: 'root' })).stdout, 'root\n0\n')
    await assert.rejects(sbx.commands.run('true', { user: 'nobody-here' }), (e) => e instanceof AuthenticationError && /invalid username: 'nobody-here'/.test(e.message))
  })

  test('background: list, stdin, wait', async () => {
    const handle = await sbx.commands.run('cat; echo done', { background: true, stdin: true })
    const listed = await sbx.commands.list()
    assert.ok(listed.some((p) => p.pid === handle.pid && p.cmd === '/bin/bash' && p.args.includes('cat; echo done')))
    await sbx.commands.sendStdin(handle.pid, 'hello\n')
    await handle.sendStdin('again\n')
    await handle.closeStdin()
    const result = await handle.wait()
    assert.equal(result.stdout, 'hello\nagain\ndone\n')
    assert.ok(!(await sbx.commands.list()).some((p) => p.pid === handle.pid))
  })

  test('background: connect and kill', async () => {
    const handle = await sbx.commands.run('echo up; sleep 60', { background: true })
    await sbx.commands.run(`kill -0 ${handle.pid}`)
    const second = await sbx.commands.connect(handle.pid)
    assert.equal(second.pid, handle.pid)
    assert.equal(await sbx.commands.kill(handle.pid), true)
    for (const h of [handle, second]) {
      await assert.rejects(h.wait(), (e) => e instanceof CommandExitError && e.exitCode === -1)
    }
    assert.equal(await sbx.commands.kill(handle.pid), false)
    await assert.rejects(sbx.commands.connect(999_999), NotFoundError)
  })

  test('timeoutMs ends the command', async () => {
    const started = Date.now()
    await assert.rejects(sbx.commands.run('sleep 987', { timeoutMs: 1000 }), TimeoutError)
    assert.ok(Date.now() - started < 10_000)
    await sleep(500)
    assert.ok(!(await sbx.commands.run('ps ax -o args || true')).stdout.includes('sleep 987'))
  })

  test('a terminal', async () => {
    let seen = ''
    const decoder = new TextDecoder()
    const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: (d) => (seen += decoder.decode(d, { stream: true })) })
    await sbx.pty.resize(pty.pid, { cols: 100, rows: 30 })
    await sbx.pty.sendInput(pty.pid, new TextEncoder().encode('stty size; exit\n'))
    await pty.wait()
    assert.match(seen, /30 100/)
  })

  test('files: text, bytes, empty, 64 MB', async () => {
    const info = await sbx.files.write('dir/of/text é.txt', 'Grüße\n')
    assert.equal(info.path, '/home/user/dir/of/text é.txt')
    assert.equal(await sbx.files.read('dir/of/text é.txt'), 'Grüße\n')
    assert.equal((await sbx.commands.run('stat -c "%a %U" "dir/of/text é.txt"')).stdout, '644 user\n')

    const all = Uint8Array.from({ length: 256 }, (_, i) => i)
    await sbx.files.write('/tmp/bytes', all.buffer)
    assert.deepEqual(await sbx.files.read('/tmp/bytes', { format: 'bytes' }), all)

    await sbx.files.write('empty', '')
    assert.equal(await sbx.files.read('empty'), '')

    const big = randomBytes(64 << 20)
    await sbx.files.write('big', big.buffer.slice(big.byteOffset, big.byteOffset + big.length))
    assert.equal((await sbx.commands.run('sha256sum < big')).stdout.split(' ')[0], sha(big))
    assert.equal(sha(await sbx.files.read('big', { format: 'bytes' })), sha(big))
    await sbx.files.remove('big')

    assert.match(await sbx.files.read('/proc/version'), /Linux/)
    await assert.rejects(sbx.files.read('missing'), FileNotFoundError)
    await assert.rejects(sbx.files.read('/tmp'), InvalidArgumentError)
    await assert.rejects(sbx.files.write('/etc/nope', 'x'), SandboxError)
  })

  test('files: several at one time', async () => {
    const infos = await sbx.files.write([
      { path: 'many/a', data: 'A' },
      { path: 'many/b', data: new Blob(['B']) },
    ])
    assert.deepEqual(infos.map((i) => i.path).sort(), ['/home/user/many/a', '/home/user/many/b'])
    assert.equal((await sbx.files.read('many/a')) + (await sbx.files.read('many/b')), 'AB')
  })

  test('directories', async () => {
    assert.equal(await sbx.files.makeDir('tree/inner'), true)
    assert.equal(await sbx.files.makeDir('tree/inner'), false)
    await sbx.files.write('tree/b', 'b')
    await sbx.files.write('tree/inner/a', 'a')
    assert.deepEqual((await sbx.files.list('tree')).map((e) => [e.name, e.type, e.path]), [
      ['b', 'file', '/home/user/tree/b'],
      ['inner', 'dir', '/home/user/tree/inner'],
    ])
    assert.deepEqual((await sbx.files.list('tree', { depth: 2 })).map((e) => e.name), ['b', 'inner', 'a'])
    const info = await sbx.files.getInfo('tree/b')
    assert.equal(info.size, 1)
    assert.equal(info.owner, 'user')
    assert.equal(info.permissions, '-rw-r--r--')
    const moved = await sbx.files.rename('tree/b', 'tree/deep/c')
    assert.equal(moved.path, '/home/user/tree/deep/c')
    assert.equal(await sbx.files.exists('tree/b'), false)
    assert.equal(await sbx.files.exists('tree/deep/c'), true)
    await sbx.files.remove('tree')
    assert.equal(await sbx.files.exists('tree'), false)
    await sbx.files.remove('tree')
    await assert.rejects(sbx.files.list('tree'), FileNotFoundError)
  })

  test('info, timeout, connect', async () => {
    await sbx.setTimeout(600_000)
    const info = await sbx.getInfo()
    assert.equal(info.sandboxId, sbx.sandboxId)
    assert.equal(info.state, 'running')
    assert.deepEqual(info.metadata, { suite: 'first light', 'a b': 'c&d=e' })
    const left = info.endAt - Date.now()
    assert.ok(left > 590_000 && left <= 601_000, `${left} ms are left`)
    const again = await Sandbox.connect(sbx.sandboxId)
    assert.equal((await again.commands.run('echo same')).stdout, 'same\n')
    assert.equal(await again.isRunning(), true)
  })

  test('list', async () => {
    const paginator = Sandbox.list({ query: { metadata: { 'a b': 'c&d=e' }, state: ['running'] }, limit: 1 })
    const found = []
    while (paginator.hasNext) found.push(...(await paginator.nextItems()))
    assert.ok(found.some((s) => s.sandboxId === sbx.sandboxId))
    assert.deepEqual(await Sandbox.list({ query: { metadata: { 'a b': 'other' } } }).nextItems(), [])
  })
})

test('pages', async () => {
  const run = randomBytes(4).toString('hex')
  const made = await Promise.all([1, 2, 3].map(() => Sandbox.create({ timeoutMs: 60_000, metadata: { run } })))
  try {
    const paginator = Sandbox.list({ query: { metadata: { run } }, limit: 2 })
    const first = await paginator.nextItems()
    assert.equal(first.length, 2)
    assert.equal(paginator.hasNext, true)
    const second = await paginator.nextItems()
    assert.equal(second.length, 1)
    assert.equal(paginator.hasNext, false)
    assert.deepEqual([...first, ...second].map((s) => s.sandboxId).sort(), made.map((s) => s.sandboxId).sort())
  } finally {
    await Promise.all(made.map((s) => s.kill()))
  }
})

test('kill', async () => {
  const sbx = await Sandbox.create({ timeoutMs: 60_000 })
  const running = await sbx.commands.run('sleep 60', { background: true })
  const ended = assert.rejects(running.wait(), (e) => e instanceof TimeoutError && /killed or reached its end of life/.test(e.message))
  assert.equal(await sbx.kill(), true)
  await ended
  assert.equal(await sbx.isRunning(), false)
  assert.equal(await sbx.kill(), false)
  await assert.rejects(sbx.commands.run('true'), SandboxError)
  await assert.rejects(sbx.getInfo(), SandboxError)
})

test('the end of life', async () => {
  const sbx = await Sandbox.create({ timeoutMs: 2000 })
  await assert.rejects(sbx.commands.run('sleep 60'), TimeoutError)
  assert.equal(await sbx.isRunning(), false)
})

test('the base class of @e2b/code-interpreter', async () => {
  const sbx = await CodeInterpreter.create({ timeoutMs: 60_000 })
  try {
    assert.equal((await sbx.commands.run('echo $((6*7))')).stdout, '42\n')
  } finally {
    await sbx.kill()
  }
})

test('a wrong API key', async () => {
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
})

test('an unknown template', async () => {
  await assert.rejects(Sandbox.create('no-such-template'), /template 'no-such-template' not found/)
})

test('a wrong access token', async () => {
  const sbx = await Sandbox.create({ timeoutMs: 60_000 })
  try {
    const reply = await fetch(`${process.env.E2B_SANDBOX_URL}/envs`, {
      headers: { 'E2b-Sandbox-Id': sbx.sandboxId, 'E2b-Sandbox-Port': '49983', 'X-Access-Token': 'wrong' },
    })
    assert.equal(reply.status, 401)
  } finally {
    await sbx.kill()
  }
})
