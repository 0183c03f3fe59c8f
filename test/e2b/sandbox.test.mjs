// The life of sandboxes with the unmodified JavaScript SDK: every option of
// create, lists, what becomes of calls when a sandbox ends, which error class
// each failure has, and what Airlock does not have yet.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { after, before, describe, test } from 'node:test'
import {
  ALL_TRAFFIC,
  AuthenticationError,
  BuildError,
  E2B,
  FileNotFoundError,
  InvalidArgumentError,
  NotEnoughSpaceError,
  NotFoundError,
  Sandbox,
  SandboxError,
  SandboxNotFoundError,
  Secret,
  SecretError,
  Template,
  TemplateError,
  TimeoutError,
  Volume,
  VolumeError,
} from 'e2b'

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
const is = (cls, text) => (e) => {
  assert.ok(e instanceof cls, `${e?.constructor?.name}: ${e?.message}`)
  assert.match(e.message, text)
  return true
}

test('create with every option', async () => {
  const lines = []
  const log = (...all) => lines.push(all.join(' '))
  const sbx = await Sandbox.create('base', {
    timeoutMs: 90_500, // rounded up to whole seconds
    metadata: { user: 'ünï', empty: '' },
    envs: { A: 'from create', QUOTES: `"'$HOME\n` },
    secure: true,
    allowInternetAccess: false,
    network: {
      allowOut: ({ allTraffic }) => (assert.equal(allTraffic, ALL_TRAFFIC), ['example.com', '1.1.1.1']),
      denyOut: [ALL_TRAFFIC],
      allowPublicTraffic: true,
      maskRequestHost: 'localhost:${PORT}',
      httpsPorts: [8443],
    },
    lifecycle: { onTimeout: 'kill', autoResume: false },
    requestTimeoutMs: 30_000,
    retries: 1,
    apiHeaders: { 'X-Of-Ours': 'ignored' },
    logger: { debug: log, info: log, warn: log, error: log },
  })
  try {
    assert.match(sbx.sandboxId, /^i[a-z0-9]{20}$/)
    assert.ok(lines.some((l) => l.includes('/v2/sandboxes')))
    const info = await sbx.getInfo()
    assert.deepEqual(info.metadata, { user: 'ünï', empty: '' })
    assert.deepEqual([info.templateId, info.state, info.cpuCount, info.memoryMB, info.allowInternetAccess], ['base', 'running', 2, 512, false])
    assert.deepEqual(info.lifecycle, { onTimeout: 'kill', autoResume: false })
    assert.deepEqual(JSON.parse(JSON.stringify(info.network)), {
      allowOut: ['example.com', '1.1.1.1'], denyOut: [ALL_TRAFFIC], allowPublicTraffic: true, maskRequestHost: 'localhost:${PORT}', httpsPorts: [8443],
    })
    const life = info.endAt - info.startedAt // it begins when the sandbox is ready
    assert.ok(life >= 91_000 && life < 100_000, `${life}`)
    assert.deepEqual(await Sandbox.getFullInfo(sbx.sandboxId), info)
    const { stdout } = await sbx.commands.run('printf "%s|%s" "$A" "$QUOTES"')
    assert.equal(stdout, `from create|"'$HOME\n`)
  } finally {
    await sbx.kill()
  }
})

test('list: metadata, state, template, start, order, pages', async () => {
  const run = randomBytes(4).toString('hex')
  const made = []
  for (const n of ['1', '2', '3']) made.push(await Sandbox.create({ timeoutMs: 60_000, metadata: { run, n } }))
  const ids = made.map((s) => s.sandboxId)
  const all = async (opts) => {
    const found = []
    const pages = Sandbox.list(opts)
    while (pages.hasNext) found.push(...(await pages.nextItems()))
    return found.map((s) => s.sandboxId)
  }
  try {
    assert.deepEqual(await all({ query: { metadata: { run } } }), ids.toReversed()) // newest first
    assert.deepEqual(await all({ query: { metadata: { run } }, order: 'asc', limit: 1 }), ids)
    assert.deepEqual(await all({ query: { metadata: { run, n: '2' } } }), [ids[1]])
    assert.deepEqual(await all({ query: { metadata: { run }, state: ['running', 'paused'] } }), ids.toReversed())
    assert.deepEqual(await all({ query: { metadata: { run }, state: ['paused'] } }), [])
    assert.deepEqual(await all({ query: { metadata: { run }, template: 'base' } }), ids.toReversed())
    assert.deepEqual(await all({ query: { metadata: { run }, template: 'other' } }), [])
    const second = (await made[1].getInfo()).startedAt
    assert.deepEqual(await all({ query: { metadata: { run }, startedAfter: second }, order: 'asc' }), ids.slice(1))
    const pages = Sandbox.list({ query: { metadata: { run } }, limit: 2 })
    const [first] = await pages.nextItems()
    assert.deepEqual([first.metadata, first.templateId, first.state], [{ run, n: '3' }, 'base', 'running'])
    assert.deepEqual(await all({ query: { metadata: { run } }, nextToken: pages.nextToken }), [ids[0]])
    await assert.rejects(Sandbox.list({ limit: 101 }).nextItems(), is(SandboxError, /^400: limit is "101": give a number from 1 to 100/))
    await assert.rejects(Sandbox.list({ nextToken: 'x' }).nextItems(), is(SandboxError, /^400: nextToken/))
  } finally {
    await Promise.all(made.map((s) => s.kill()))
  }
})

test('timeouts: longer, shorter, now', async () => {
  const sbx = await Sandbox.create({ timeoutMs: 60_000 })
  const left = async () => (await sbx.getInfo()).endAt - Date.now()
  await sbx.setTimeout(300_000)
  assert.ok((await left()) > 290_000)
  await sbx.connect({ timeoutMs: 10_000 }) // a connect never shortens
  assert.ok((await left()) > 280_000)
  await Sandbox.setTimeout(sbx.sandboxId, 30_000)
  assert.ok((await left()) <= 31_000)
  await assert.rejects(sbx.setTimeout(25 * 3600_000), is(SandboxError, /^400: Timeout cannot be greater than 24 hours/))
  await sbx.setTimeout(1000)
  for (let i = 0; i < 100 && (await sbx.isRunning()); i++) await sleep(100)
  assert.equal(await sbx.isRunning(), false)
})

test('a client with its own key, connect, kill', async () => {
  const client = new E2B({ apiKey: process.env.E2B_API_KEY })
  const sbx = await client.Sandbox.create({ timeoutMs: 60_000 })
  const same = await Sandbox.connect(sbx.sandboxId)
  assert.equal((await same.commands.run('echo same')).stdout, 'same\n')
  assert.equal(await client.Sandbox.kill(sbx.sandboxId), true)
  assert.equal(await Sandbox.kill(sbx.sandboxId), false)
})

test('several files, as a stream and as a blob', async () => {
  const sbx = await Sandbox.create({ timeoutMs: 60_000 })
  try {
    await sbx.files.writeFiles([{ path: 'w/a', data: 'A' }, { path: 'w/b', data: new Blob(['B']) }])
    assert.equal(await (await sbx.files.read('w/b', { format: 'blob' })).text(), 'B')
    let text = ''
    for await (const part of await sbx.files.read('w/a', { format: 'stream' })) text += new TextDecoder().decode(part)
    assert.equal(text, 'A')
  } finally {
    await sbx.kill()
  }
})

describe('which error', () => {
  let sbx
  before(async () => {
    sbx = await Sandbox.create({ timeoutMs: 120_000 })
  })
  after(async () => {
    await sbx?.kill()
  })

  test('of arguments', async () => {
    for (const [opts, text] of [
      [{ timeoutMs: 0 }, /^400: Timeout must be greater than 0/],
      [{ timeoutMs: 25 * 3600_000 }, /^400: Timeout cannot be greater than 24 hours/],
      [{ metadata: { '': 'x' } }, /^400: metadata/],
      [{ envs: { 'A=B': 'x' } }, /^400: envVars has "A=B"/],
      [{ network: { denyOut: ['example.com'] } }, /^400: network.denyOut/],
      [{ network: { allowOut: ['example.com'] } }, /^400: network.allowOut.*0\.0\.0\.0\/0/],
    ]) {
      await assert.rejects(Sandbox.create(opts), is(SandboxError, text))
    }
    await assert.rejects(Sandbox.create('no-such'), is(SandboxError, /^404: template 'no-such' not found/))
    await assert.rejects(sbx.commands.run('true', { cwd: '/nope' }), is(InvalidArgumentError, /cwd '\/nope' does not exist/))
    await assert.rejects(sbx.files.read('/tmp'), is(InvalidArgumentError, /directory/))
    await assert.rejects(sbx.files.makeDir('/etc/passwd/x'), SandboxError)
    await assert.rejects(sbx.files.list('/etc/passwd'), is(InvalidArgumentError, /not a directory/))
    await assert.rejects(sbx.pty.create({ cols: 0, rows: 0, onData: () => {} }), is(InvalidArgumentError, /terminal's size/))
  })

  test('of who asks', async () => {
    await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), is(AuthenticationError, /Unauthorized.*the API key is not known/))
    await assert.rejects(Sandbox.list({ apiKey: 'e2b_' + '0'.repeat(40) }).nextItems(), AuthenticationError)
    for (const call of [
      () => sbx.commands.run('true', { user: 'nobody-here' }),
      () => sbx.pty.create({ cols: 80, rows: 24, onData: () => {}, user: 'nobody-here' }),
      () => sbx.files.list('/', { user: 'nobody-here' }),
      () => sbx.files.read('/etc/passwd', { user: 'nobody-here' }),
      () => sbx.files.write('x', 'x', { user: 'nobody-here' }),
    ]) {
      await assert.rejects(call(), is(AuthenticationError, /invalid username: 'nobody-here'/))
    }
  })

  test('of what is not there', async () => {
    for (const call of [
      () => sbx.files.read('no'),
      () => sbx.files.list('no'),
      () => sbx.files.getInfo('no'),
      () => sbx.files.rename('no', 'where'),
    ]) {
      await assert.rejects(call(), is(FileNotFoundError, /\/home\/user\/no/))
    }
    for (const call of [
      () => sbx.commands.connect(99_999),
      () => sbx.commands.sendStdin(99_999, 'x'),
      () => sbx.commands.closeStdin(99_999),
      () => sbx.pty.connect(99_999, { onData: () => {} }),
      () => sbx.pty.sendInput(99_999, new Uint8Array(1)),
      () => sbx.pty.resize(99_999, { cols: 1, rows: 1 }),
    ]) {
      await assert.rejects(call(), is(NotFoundError, /99999/))
    }
    assert.deepEqual([await sbx.commands.kill(99_999), await sbx.pty.kill(99_999)], [false, false])
  })

  test('of a call that takes too long', async () => {
    await assert.rejects(sbx.commands.run('sleep 60', { timeoutMs: 300 }), is(TimeoutError, /timeoutMs/))
    const handle = await sbx.commands.run('sleep 60', { background: true, timeoutMs: 300 })
    await assert.rejects(handle.wait(), is(TimeoutError, /timeoutMs/))
    const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: () => {}, timeoutMs: 300 })
    await assert.rejects(pty.wait(), is(TimeoutError, /timeoutMs/))
  })

  test('of a full disk', async () => {
    await sbx.commands.run('fallocate -l 1020M /tmp/full', { user: 'root' })
    await assert.rejects(sbx.files.write('more', randomBytes(8 << 20).toString('hex')), is(NotEnoughSpaceError, /space/))
    await sbx.files.remove('/tmp/full', { user: 'root' })
    await sbx.files.write('more', 'fits again')
  })
})

describe('when a sandbox ends, what is under way', () => {
  for (const [how, end] of Object.entries({ 'by kill': (s) => s.kill(), 'by its timeout': (s) => s.setTimeout(500) })) {
    test(how, async () => {
      const sbx = await Sandbox.create({ timeoutMs: 60_000 })
      const background = await sbx.commands.run('sleep 60', { background: true })
      const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: () => {} })
      const gone = is(TimeoutError, /killed or reached its end of life/)
      const ends = [
        assert.rejects(sbx.commands.run('while echo busy; do sleep 0.01; done'), gone),
        assert.rejects(background.wait(), gone),
        assert.rejects(pty.wait(), gone),
        assert.rejects(sbx.files.write('big', new ReadableStream({ pull: (c) => (c.enqueue(new Uint8Array(1 << 16)), sleep(20)) }))),
      ]
      await sleep(300)
      await end(sbx)
      await Promise.all(ends)
      for (let i = 0; i < 100 && (await sbx.isRunning()); i++) await sleep(50)
      assert.equal(await sbx.isRunning(), false)
      await assert.rejects(sbx.commands.run('true'), SandboxNotFoundError)
      await assert.rejects(sbx.pty.create({ cols: 80, rows: 24, onData: () => {} }), SandboxNotFoundError)
      for (const call of [() => sbx.files.read('x'), () => sbx.files.list('/'), () => sbx.commands.list(), () => background.sendStdin('x')]) {
        await assert.rejects(call(), is(TimeoutError, /was not found/))
      }
      for (const call of [() => sbx.getInfo(), () => sbx.setTimeout(1000), () => sbx.connect(), () => sbx.getMetrics(), () => Sandbox.getFullInfo(sbx.sandboxId)]) {
        await assert.rejects(call(), SandboxNotFoundError)
      }
      assert.equal(await sbx.kill(), false)
    })
  }
})

test('what Airlock does not have yet says so', async () => {
  const sbx = await Sandbox.create({ timeoutMs: 60_000 })
  const create = (opts) => () => Sandbox.create(opts)
  try {
    for (const [what, cls, call] of [
      ['pausing', SandboxError, () => sbx.pause()],
      ['pausing', SandboxError, () => sbx.betaPause()],
      ['pausing', SandboxError, () => Sandbox.pause(sbx.sandboxId, { keepMemory: false })],
      ['pausing', SandboxError, () => Sandbox.betaPause(sbx.sandboxId)],
      ['forking', SandboxError, () => sbx.fork({ count: 2 })],
      ['forking', SandboxError, () => Sandbox.fork(sbx.sandboxId)],
      ['snapshots', SandboxError, () => sbx.createSnapshot({ name: 'a' })],
      ['snapshots', SandboxError, () => Sandbox.createSnapshot(sbx.sandboxId)],
      ['snapshots', SandboxError, () => sbx.listSnapshots().nextItems()],
      ['snapshots', SandboxError, () => Sandbox.listSnapshots().nextItems()],
      ['templates of your own', SandboxError, () => Sandbox.deleteSnapshot('base/snap:default')],
      ['autoPause', SandboxError, create({ lifecycle: { onTimeout: 'pause' } })],
      ['autoPause', SandboxError, create({ lifecycle: { onTimeout: { action: 'pause', keepMemory: false } } })],
      ['autoPause', SandboxError, create({ lifecycle: { onTimeout: 'pause', autoResume: true } })],
      ['mcp', SandboxError, create({ template: 'base', mcp: { browserbase: {} } })],
      ['volumeMounts', SandboxError, create({ volumeMounts: { '/v': 'volume' } })],
      ['iam', SandboxError, create({ iam: { tokens: { aws: Secret.iamToken({ audience: 'a', tokenType: 'JWT-SVID' }) } } })],
      ['network.rules with .*', SandboxError, create({ network: { rules: { 'a.example': [{ transform: { headers: { A: Secret.fill('s') } } }] } } })],
      ['templates of your own', BuildError, () => Template.build(Template().fromBaseImage().runCmd('true'), 'mine', { cpuCount: 1, memoryMB: 512 })],
      ['templates of your own', BuildError, () => Template.buildInBackground(Template().fromImage('debian'), 'mine')],
      ['templates of your own', BuildError, () => Template.getBuildStatus({ templateId: 't', buildId: 'b' })],
      ['templates of your own', TemplateError, () => Template.assignTags('mine:v1', 'v2')],
      ['templates of your own', TemplateError, () => Template.removeTags('mine', 'v2')],
      ['templates of your own', TemplateError, () => Template.getTags('mine')],
      ['volumes', VolumeError, () => Volume.create('v')],
      ['volumes', VolumeError, () => Volume.connect('v')],
      ['volumes', VolumeError, () => Volume.getInfo('v')],
      ['volumes', VolumeError, () => Volume.list()],
      ['volumes', VolumeError, () => Volume.destroy('v')],
      ['secrets', SecretError, () => Secret.create('s', 'value')],
      ['secrets', SecretError, () => Secret.update('s', { value: 'v' })],
      ['secrets', SecretError, () => Secret.getInfo('s')],
      ['secrets', SecretError, () => Secret.list().nextItems()],
      ['secrets', SecretError, () => Secret.exists('s')],
      ['secrets', SecretError, () => Secret.destroy('s')],
    ]) {
      await assert.rejects(call(), is(cls, new RegExp(`501: (this Airlock does not support ${what}.* yet|${what} is not supported by this Airlock yet: leave it out)`)), `${what}: ${call}`)
    }
  } finally {
    await sbx.kill()
  }
})

test('whether a template exists', async () => {
  assert.equal(await Template.exists('base'), true)
  assert.equal(await Template.aliasExists('no-such'), false)
})
