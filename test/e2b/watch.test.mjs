// Watching directories with the unmodified JavaScript SDK.
import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import { FileNotFoundError, InvalidArgumentError, Sandbox, TimeoutError } from 'e2b'

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

describe('watchDir', () => {
  let sbx, files
  before(async () => {
    sbx = await Sandbox.create({ timeoutMs: 120_000 })
    ;({ files } = sbx)
  })
  after(async () => {
    await sbx?.kill()
  })

  // watch collects events; seen waits for one.
  const watch = async (path, opts = {}) => {
    const events = []
    let ended
    const end = new Promise((resolve) => (ended = resolve))
    const handle = await files.watchDir(path, (e) => void events.push(e), { timeoutMs: 0, ...opts, onExit: ended })
    const seen = async (type, name) => {
      for (let i = 0; i < 200; i++) {
        const e = events.find((e) => e.type === type && e.name === name)
        if (e) return e
        await sleep(50)
      }
      assert.fail(`no ${type} of ${name} in ${JSON.stringify(events)}`)
    }
    return { handle, events, seen, end }
  }

  test('create, write, chmod, rename, remove', async () => {
    await files.makeDir('w')
    const w = await watch('w')
    await files.write('w/a', 'text')
    await w.seen('create', 'a')
    await w.seen('write', 'a')
    await sbx.commands.run('chmod 600 w/a')
    await w.seen('chmod', 'a')
    await files.rename('w/a', 'w/b')
    await w.seen('rename', 'a')
    await w.seen('create', 'b')
    await files.remove('w/b')
    await w.seen('remove', 'b')
    await files.makeDir('w/sub')
    await w.seen('create', 'sub')
    await files.write('w/sub/inner', 'x')
    await files.write('w/last', 'x')
    await w.seen('create', 'last')
    assert.ok(!w.events.some((e) => e.name.includes('inner')))
    await w.handle.stop()
    await w.end // with the SDK's own error of an aborted call
  })

  test('recursive: directories that come later too', async () => {
    await files.makeDir('r/deep')
    const w = await watch('r', { recursive: true })
    await files.write('r/deep/a', 'x')
    await w.seen('create', 'deep/a')
    await files.makeDir('r/new')
    await w.seen('create', 'new')
    await files.write('r/new/b', 'x')
    await w.seen('create', 'new/b')
    await w.handle.stop()
  })

  test('the entry of what changed', async () => {
    await files.makeDir('e')
    const w = await watch('e', { includeEntry: true })
    await files.write('e/a', 'text')
    const { entry } = await w.seen('write', 'a')
    assert.deepEqual([entry.name, entry.path, entry.type, entry.owner], ['a', '/home/user/e/a', 'file', 'user'])
    await files.remove('e/a')
    assert.equal((await w.seen('remove', 'a')).entry, undefined)
    await w.handle.stop()
  })

  test('what cannot be watched', async () => {
    await files.write('file', 'x')
    await assert.rejects(files.watchDir('no', () => {}), FileNotFoundError)
    await assert.rejects(files.watchDir('file', () => {}), InvalidArgumentError)
  })

  test('its time is over', async () => {
    const w = await watch('/tmp', { timeoutMs: 300 })
    assert.ok((await w.end) instanceof TimeoutError)
  })

  test('the sandbox ends', async () => {
    const other = await Sandbox.create({ timeoutMs: 60_000 })
    const end = new Promise((resolve) => other.files.watchDir('/tmp', () => {}, { timeoutMs: 0, onExit: resolve }).then(() => other.kill()))
    const e = await end
    assert.ok(e instanceof TimeoutError && /killed or reached its end of life/.test(e.message), e)
  })
})
