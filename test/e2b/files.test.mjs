// Files with the unmodified E2B SDK against a running Airlock.
import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import { Sandbox } from 'e2b'

describe('files', () => {
  let sbx
  before(async () => {
    sbx = await Sandbox.create({ timeoutMs: 120_000 })
  })
  after(async () => {
    await sbx?.kill()
  })

  test('upload and download URLs, fetched without any header', async () => {
    const form = new FormData()
    form.append('file', new Blob(['through a URL']), 'ignored.txt')
    const up = await fetch(await sbx.uploadUrl('signed.txt'), { method: 'POST', body: form })
    assert.equal(up.status, 200, await up.text())
    assert.equal(await sbx.files.read('signed.txt'), 'through a URL')
    const url = await sbx.downloadUrl('signed.txt', { useSignatureExpiration: 10_000 })
    const down = await fetch(url)
    assert.equal(down.status, 200)
    assert.equal(await down.text(), 'through a URL')
    assert.equal((await fetch(url.replace('signed.txt', 'other.txt'))).status, 401)
    const old = await fetch(await sbx.downloadUrl('signed.txt', { useSignatureExpiration: -10_000 }))
    assert.equal(old.status, 401)
    assert.deepEqual(await old.json(), { code: 401, message: 'signature is already expired' })
  })

  test('odd names come back as they went', async () => {
    for (const name of ['a\nb', 'a"b\'c', '100%25 %', '🜁 é', '-rf', '--', 'a\\b', ' ']) {
      const path = `/home/user/odd/${name}`
      await sbx.files.write(path, name)
      assert.equal(await sbx.files.read(path), name)
      assert.deepEqual((await sbx.files.list('/home/user/odd')).map((e) => e.name), [name])
      await sbx.files.remove(path)
    }
  })
})
