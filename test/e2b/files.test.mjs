// Files with the unmodified E2B SDK against a running Airlock.
import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import { AuthenticationError, FileNotFoundError, FileType, InvalidArgumentError, Sandbox, SandboxError } from 'e2b'

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

  const all = Uint8Array.from({ length: 256 }, (_, i) => i)
  const stream = (...chunks) => new Blob(chunks).stream()

  test('write takes strings, buffers, blobs and streams', async () => {
    for (const [kind, data, want] of [
      ['string', 'Grüße\n🜁', 'Grüße\n🜁'],
      ['empty string', '', ''],
      ['ArrayBuffer', all.buffer, all],
      ['Blob', new Blob([all, 'é']), new Uint8Array([...all, 0xc3, 0xa9])],
      ['ReadableStream', () => stream(all, all), new Uint8Array([...all, ...all])],
    ]) {
      for (const opts of [{}, { gzip: true }, { useOctetStream: true }, { useOctetStream: false }]) {
        const path = `/home/user/write/${kind}`
        const info = await sbx.files.write(path, typeof data === 'function' ? data() : data, opts)
        assert.deepEqual(info, { name: kind, path, type: 'file', metadata: undefined }, `${kind} ${JSON.stringify(opts)}`)
        const bytes = typeof want === 'string' ? new TextEncoder().encode(want) : want
        assert.deepEqual(await sbx.files.read(path, { format: 'bytes' }), bytes, `${kind} ${JSON.stringify(opts)}`)
      }
    }
    const big = new Uint8Array(8 << 20).map((_, i) => i % 251)
    await sbx.files.write('write/big', stream(big), { gzip: true })
    assert.deepEqual(await sbx.files.read('write/big', { format: 'bytes' }), big)
  })

  test('read gives text, bytes, blobs and streams, with gzip and without', async () => {
    const text = 'line é\n'.repeat(20_000)
    await sbx.files.write('read/text', text)
    await sbx.files.write('read/empty', '')
    for (const gzip of [true, false, undefined]) {
      assert.equal(await sbx.files.read('read/text', { gzip }), text)
      assert.equal(await sbx.files.read('read/text', { format: 'text', gzip }), text)
      assert.equal(new TextDecoder().decode(await sbx.files.read('read/text', { format: 'bytes', gzip })), text)
      assert.equal(await (await sbx.files.read('read/text', { format: 'blob', gzip })).text(), text)
      assert.equal(await new Response(await sbx.files.read('read/text', { format: 'stream', gzip })).text(), text)
    }
    assert.equal(await sbx.files.read('read/empty'), '')
    assert.deepEqual(await sbx.files.read('read/empty', { format: 'bytes' }), new Uint8Array())
    assert.equal((await sbx.files.read('read/empty', { format: 'blob' })).size, 0)
    assert.equal(await new Response(await sbx.files.read('read/empty', { format: 'stream' })).text(), '')
    // A stream that is given up frees its connection.
    for (let i = 0; i < 20; i++) {
      await (await sbx.files.read('/dev/zero', { format: 'stream' })).cancel()
    }
    assert.equal(await sbx.files.read('read/empty'), '')
  })

  test('several files at one time', async () => {
    assert.deepEqual(await sbx.files.write([]), [])
    for (const opts of [{}, { gzip: true }, { useOctetStream: true }]) {
      const infos = await sbx.files.writeFiles(
        [
          { path: 'several/a', data: 'A' },
          { path: '/tmp/several/b', data: all.buffer },
          { path: 'several/deep/er/c', data: new Blob(['C']) },
          { path: 'several/d', data: stream('D') },
        ],
        { ...opts, metadata: { Of: 'all' } },
      )
      assert.deepEqual(
        infos.map((i) => [i.path, i.metadata]),
        ['/home/user/several/a', '/tmp/several/b', '/home/user/several/deep/er/c', '/home/user/several/d'].map((path) => [path, { of: 'all' }]),
      )
      assert.equal((await sbx.files.read('several/a')) + (await sbx.files.read('several/deep/er/c')) + (await sbx.files.read('several/d')), 'ACD')
      assert.deepEqual(await sbx.files.read('/tmp/several/b', { format: 'bytes' }), all)
    }
    await assert.rejects(sbx.files.write([{ path: 'twice', data: '1' }, { path: './twice', data: '2' }]), InvalidArgumentError)
  })

  test('metadata', async () => {
    const metadata = { author: 'Ann Example', 'x.y-z_1': 'a=b; c' }
    for (const opts of [{}, { gzip: true }, { useOctetStream: true }]) {
      assert.deepEqual((await sbx.files.write('meta/f', 'x', { ...opts, metadata })).metadata, metadata)
      assert.deepEqual((await sbx.files.getInfo('meta/f')).metadata, metadata)
      assert.deepEqual((await sbx.files.list('meta')).map((e) => e.metadata), [metadata])
      assert.deepEqual((await sbx.files.write('meta/f', 'x', { ...opts, metadata: { Other: '' } })).metadata, { other: '' })
      assert.deepEqual((await sbx.files.getInfo('meta/f')).metadata, { other: '' })
      assert.equal((await sbx.files.write('meta/f', 'x', opts)).metadata, undefined)
      assert.equal((await sbx.files.getInfo('meta/f')).metadata, undefined)
    }
    await sbx.files.write('meta/f', 'x', { metadata })
    assert.deepEqual((await sbx.files.rename('meta/f', 'meta/g')).metadata, metadata)
    await sbx.commands.run('mv meta/g meta/h')
    assert.deepEqual((await sbx.files.getInfo('meta/h')).metadata, metadata)
    await assert.rejects(sbx.files.write('meta/f', 'x', { metadata: { ['k'.repeat(247)]: 'v' } }), (e) => e instanceof InvalidArgumentError && /too long/.test(e.message))
    await assert.rejects(sbx.files.write('meta/f', 'x', { metadata: { k: 'v'.repeat(4096) } }), (e) => e instanceof InvalidArgumentError && /X-Metadata-K/.test(e.message))
    assert.equal(await sbx.files.exists('meta/f'), false)
  })

  test('what getInfo and list say', async () => {
    await sbx.commands.run('mkdir -p info/dir/sub; echo -n 12345 > info/file; chmod 751 info/file; ln -s file info/link; ln -s nowhere info/dangling; echo > info/dir/sub/leaf; sudo touch info/root')
    const file = await sbx.files.getInfo('info/file')
    assert.ok(Math.abs(file.modifiedTime - new Date()) < 60_000)
    assert.deepEqual(
      { ...file, modifiedTime: undefined },
      {
        name: 'file', type: FileType.FILE, path: '/home/user/info/file', size: 5, mode: 0o751, permissions: '-rwxr-x--x', owner: 'user', group: 'user',
        modifiedTime: undefined, symlinkTarget: undefined, metadata: undefined,
      },
    )
    const dir = await sbx.files.getInfo('~/info/dir')
    assert.deepEqual([dir.type, dir.permissions, dir.mode], [FileType.DIR, 'drwxr-xr-x', 0o755])
    const link = await sbx.files.getInfo('info/link')
    assert.deepEqual([link.type, link.mode, link.symlinkTarget], [FileType.FILE, 0o751, '/home/user/info/file'])
    assert.equal((await sbx.files.getInfo('info/root')).owner, 'root')
    const names = async (depth) => (await sbx.files.list('info', { depth })).map((e) => e.path.slice('/home/user/info/'.length))
    assert.deepEqual(await names(), ['dir', 'file', 'link', 'root']) // the SDK leaves out what has no type
    assert.deepEqual(await names(1), ['dir', 'file', 'link', 'root'])
    assert.deepEqual(await names(2), ['dir', 'dir/sub', 'file', 'link', 'root'])
    assert.deepEqual(await names(9), ['dir', 'dir/sub', 'dir/sub/leaf', 'file', 'link', 'root'])
    await assert.rejects(sbx.files.list('info', { depth: 0 }), InvalidArgumentError)
    await assert.rejects(sbx.files.list('info/file'), InvalidArgumentError)
    await assert.rejects(sbx.files.list('info/missing'), FileNotFoundError)
    await assert.rejects(sbx.files.getInfo('info/missing'), FileNotFoundError)
  })

  test('exists, makeDir, rename, remove', async () => {
    assert.equal(await sbx.files.exists('tree'), false)
    assert.equal(await sbx.files.makeDir('tree/a/b'), true)
    assert.equal(await sbx.files.makeDir('tree/a'), false)
    assert.equal(await sbx.files.exists('tree/a/b'), true)
    await sbx.files.write('tree/f', 'f')
    await assert.rejects(sbx.files.makeDir('tree/f'), InvalidArgumentError)
    assert.equal((await sbx.files.rename('tree/a', 'moved/to/a')).path, '/home/user/moved/to/a')
    assert.equal((await sbx.files.rename('tree/f', 'moved/to/a/b/f')).type, FileType.FILE)
    await sbx.files.write('tree/g', 'g')
    await sbx.files.rename('tree/g', 'moved/to/a/b/f') // in the place of another
    assert.equal(await sbx.files.read('moved/to/a/b/f'), 'g')
    await assert.rejects(sbx.files.rename('tree/missing', 'x'), FileNotFoundError)
    await assert.rejects(sbx.files.rename('moved', 'moved/to/itself'), InvalidArgumentError)
    await sbx.files.remove('moved')
    await sbx.files.remove('moved')
    assert.equal(await sbx.files.exists('moved'), false)
    await assert.rejects(sbx.files.remove('/'), InvalidArgumentError)
  })

  test('users and paths', async () => {
    const root = { user: 'root' }
    assert.equal((await sbx.files.write('whose', 'r', root)).path, '/root/whose')
    assert.equal((await sbx.files.write('~/whose', 'u')).path, '/home/user/whose')
    assert.equal(await sbx.files.read('whose', root), 'r')
    assert.equal(await sbx.files.read('~/../user/whose'), 'u')
    assert.equal(await sbx.files.exists('whose', root), true)
    assert.equal((await sbx.files.getInfo('~', root)).path, '/root')
    assert.equal(await sbx.files.makeDir('/etc/of-root', root), true)
    assert.equal((await sbx.files.getInfo('/etc/of-root')).owner, 'root')
    assert.equal((await sbx.files.rename('whose', 'etc', root)).path, '/root/etc')
    assert.deepEqual((await sbx.files.list('~', root)).map((e) => e.name).filter((n) => n === 'etc'), ['etc'])
    await assert.rejects(sbx.files.read('/root/etc'), SandboxError)
    await assert.rejects(sbx.files.write('/etc/mine', 'x'), SandboxError)
    await sbx.files.remove('etc', root)
    for (const call of [
      (o) => sbx.files.read('x', o),
      (o) => sbx.files.write('x', '', o),
      (o) => sbx.files.list('.', o),
      (o) => sbx.files.exists('x', o),
      (o) => sbx.files.makeDir('x', o),
      (o) => sbx.files.remove('x', o),
    ]) {
      await assert.rejects(call({ user: 'nobody-here' }), AuthenticationError)
    }
    await assert.rejects(sbx.files.read('missing'), FileNotFoundError)
    await assert.rejects(sbx.files.read('/tmp'), InvalidArgumentError)
    await assert.rejects(sbx.files.write('/tmp', 'x'), InvalidArgumentError)
    await assert.rejects(sbx.files.write('n'.repeat(256), 'x'), InvalidArgumentError)
    await assert.rejects(sbx.files.read('a\0b'), InvalidArgumentError)
  })

  test('a name that is no UTF-8 is listed', async () => {
    await sbx.commands.run(`mkdir bytes; touch "bytes/$(printf 'a\\377b')" bytes/z`)
    assert.deepEqual((await sbx.files.list('bytes')).map((e) => e.name), ['a\ufffdb', 'z'])
    await assert.rejects(sbx.files.read('bytes/a\ufffdb'), FileNotFoundError)
    await sbx.files.remove('bytes')
  })

  test('signed URLs are for one path, one way, one user', async () => {
    await sbx.files.write('/root/signed', 'of root', { user: 'root' })
    const asRoot = await sbx.downloadUrl('/root/signed', { user: 'root', useSignatureExpiration: 60_000 })
    assert.equal(await (await fetch(asRoot)).text(), 'of root')
    assert.equal((await fetch(asRoot.replace('username=root', 'username=user'))).status, 401)
    assert.equal((await fetch(asRoot, { method: 'POST', body: new FormData() })).status, 401)
    const to = await sbx.uploadUrl('up.bin', { useSignatureExpiration: 60_000 })
    const up = await fetch(to, { method: 'POST', body: all, headers: { 'Content-Type': 'application/octet-stream', 'X-Metadata-Via': 'url' } })
    assert.deepEqual([up.status, await up.json()], [200, [{ name: 'up.bin', path: '/home/user/up.bin', type: 'file', metadata: { via: 'url' } }]])
    assert.equal((await fetch(to)).status, 401)
    const ranged = await fetch(await sbx.downloadUrl('up.bin'), { headers: { Range: 'bytes=10-12' } })
    assert.deepEqual([ranged.status, ranged.headers.get('content-range'), await ranged.bytes()], [206, 'bytes 10-12/256', new Uint8Array([10, 11, 12])])
    // Without a path of its own the URL takes what the form says.
    const form = new FormData()
    form.append('file', new Blob(['1']), 'form/1')
    form.append('file', new Blob(['2']), 'form/2')
    const any = await fetch(await sbx.uploadUrl(), { method: 'POST', body: form })
    assert.deepEqual((await any.json()).map((f) => f.path), ['/home/user/form/1', '/home/user/form/2'])
    assert.equal((await fetch(await sbx.uploadUrl('late', { useSignatureExpiration: -1000 }), { method: 'POST', body: form })).status, 401)
  })
})
