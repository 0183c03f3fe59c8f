// The network of a sandbox with the unmodified JavaScript SDK: what allowOut,
// denyOut and rules do, what changes when they do, and that none of it is more
// than the operator permits. NET_* name servers of the test; those at
// NET_CLOSED and NET_SECURE_CLOSED the operator forbids.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { test } from 'node:test'
import { ALL_TRAFFIC, Sandbox, SandboxError, SandboxNotFoundError } from 'e2b'

const net = process.env
const digest = (text) => createHash('sha256').update(text).digest('hex')
const host = (url) => new URL(url).hostname
const authorization = (value) => [{ transform: { headers: { Authorization: value } } }]

// box runs f with a sandbox of that network.
const box = async (opts, f) => {
  const sbx = await Sandbox.create({ timeoutMs: 120_000, ...opts })
  try {
    await f(sbx)
  } finally {
    await sbx.kill()
  }
}

// status is of an answer to curl inside, or its exit code where there is none.
const status = async (sbx, url, flags = '') => {
  const r = await sbx.commands.run(`curl -s -m 20 -o /dev/null -w '%{http_code}' ${flags} '${url}' || echo " curl $?"`)
  return r.stdout.trim().replace(/^000 /, '')
}
const body = async (sbx, url) => (await sbx.commands.run(`curl -s -m 20 '${url}'`)).stdout

// stream begins a command that reads without an end, and waits for its first bytes.
const stream = async (sbx, command) => {
  let began
  const first = new Promise((resolve) => (began = resolve))
  const handle = await sbx.commands.run(command, { background: true, timeoutMs: 60_000, onStdout: () => began() })
  const ended = handle.wait().then(() => 0, (e) => e.exitCode)
  await Promise.race([first, ended.then((code) => assert.fail(`${command} ended at once with ${code}`))])
  return { ended, handle }
}

// within fails if a promise takes longer than a second, and some for the way.
const within = async (promise, what) => {
  const late = Symbol()
  let timer
  const result = await Promise.race([promise, new Promise((resolve) => (timer = setTimeout(resolve, 2_000, late)))])
  clearTimeout(timer)
  assert.notEqual(result, late, `${what} goes on`)
  return result
}

const events = (url) => `curl -sN '${url}/events'`
const raw = (name) => `exec 3<>/dev/tcp/${name}/${net.NET_TCP_PORT}; cat <&3; exit 7`
const webSocket = (url) => `exec 3<>/dev/tcp/${host(url)}/80; printf 'GET /events HTTP/1.1\\r\\nHost: ${host(url)}\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n' >&3; cat <&3; exit 7`

test('everything that the operator permits', () => box({}, async (sbx) => {
  assert.match(await body(sbx, net.NET_OPEN), /hello from open/)
  assert.equal(await status(sbx, net.NET_SECURE), '200')
  assert.equal(await status(sbx, net.NET_ADDRESS), '200')
  assert.match((await sbx.commands.run(`head -1 < /dev/tcp/open.airlock.test/${net.NET_TCP_PORT}`)).stdout, /hello/)
  assert.equal(await status(sbx, net.NET_CLOSED), '403')
  await assert.rejects(sbx.commands.run(`head -1 < /dev/tcp/closed.airlock.test/${net.NET_TCP_PORT}`))
}))

test('allowOut: names, a wildcard, addresses', async () => {
  await box({ network: { denyOut: [ALL_TRAFFIC], allowOut: [host(net.NET_OPEN), '*.open.airlock.test'] } }, async (sbx) => {
    assert.equal(await status(sbx, net.NET_OPEN), '200')
    assert.equal(await status(sbx, net.NET_BELOW), '200')
    assert.equal(await status(sbx, net.NET_OTHER), 'curl 6') // its name does not resolve
    assert.equal(await status(sbx, net.NET_ADDRESS), '403') // though a name that is allowed is there
    assert.equal(await status(sbx, net.NET_ADDRESS, `-H 'Host: other.airlock.test'`), '403')
    await assert.rejects(sbx.commands.run(`head -1 < /dev/tcp/192.0.2.10/${net.NET_TCP_PORT}`))
  })
  await box({ network: { denyOut: [ALL_TRAFFIC], allowOut: ['*.open.airlock.test'] } }, async (sbx) => {
    assert.equal(await status(sbx, net.NET_OPEN), 'curl 6') // a wildcard is not for the name itself
  })
  await box({ allowInternetAccess: false, network: { allowOut: ['192.0.2.10'] } }, async (sbx) => {
    assert.equal(await status(sbx, net.NET_ADDRESS), '200')
    assert.equal(await status(sbx, net.NET_OPEN), 'curl 6')
  })
})

test('denyOut: all, an address, a network', async () => {
  await box({ allowInternetAccess: false }, async (sbx) => {
    assert.equal(await status(sbx, net.NET_OPEN), 'curl 6')
    assert.equal(await status(sbx, net.NET_ADDRESS), '403')
  })
  await box({ network: { denyOut: ['192.0.2.0/28'] } }, async (sbx) => {
    const r = await sbx.commands.run(`curl -s -i '${net.NET_OPEN}'`)
    assert.match(r.stdout, /^HTTP\/1\.1 403/)
    assert.match(r.stdout, /x-airlock-denied: request\/network\.deny/i)
    assert.equal((await sbx.getInfo()).network.denyOut[0], '192.0.2.0/28')
  })
})

test('nothing is wider than what the operator permits', async () => {
  const closed = host(net.NET_CLOSED)
  const wider = [
    { allowOut: [ALL_TRAFFIC] },
    { denyOut: [ALL_TRAFFIC], allowOut: [closed, '192.0.2.20', '127.0.0.1', '169.254.169.254', '10.0.0.0/8'] },
    { denyOut: [ALL_TRAFFIC], allowOut: ({ rules }) => [...rules.keys()], rules: { [closed]: authorization('x') } },
  ]
  const tries = async (sbx, what) => {
    for (const url of [net.NET_CLOSED, net.NET_SECURE_CLOSED, 'http://192.0.2.20', 'http://127.0.0.1:80', 'http://169.254.169.254', 'http://10.0.0.1']) {
      const got = await status(sbx, url)
      assert.ok(got.startsWith('403') || got.startsWith('curl'), `${url} with ${what}: ${got}`)
    }
    await assert.rejects(sbx.commands.run(`head -1 < /dev/tcp/192.0.2.20/${net.NET_TCP_PORT}`))
  }
  for (const network of wider) await box({ network }, (sbx) => tries(sbx, JSON.stringify(network)))
  await box({ allowInternetAccess: false }, async (sbx) => {
    for (const network of [...wider, { allowInternetAccess: true }]) {
      await sbx.updateNetwork(network)
      await tries(sbx, `an update to ${JSON.stringify(network)}`)
    }
    assert.equal(await status(sbx, net.NET_OPEN), '200')
  })
})

test('updateNetwork replaces, and breaks off what is open', () => box({}, async (sbx) => {
  const goes = {
    'a stream of events': await stream(sbx, events(net.NET_OTHER)),
    'a stream of events over TLS': await stream(sbx, `curl -sN '${net.NET_SECURE}/events'`),
    'a connection of bytes': await stream(sbx, raw('other.airlock.test')),
    'a WebSocket': await stream(sbx, webSocket(net.NET_OTHER)),
  }
  const stays = await stream(sbx, events(net.NET_BELOW))
  await sbx.updateNetwork({ denyOut: [ALL_TRAFFIC], allowOut: [host(net.NET_BELOW)] })
  for (const [what, { ended }] of Object.entries(goes)) {
    assert.notEqual(await within(ended, what), 0, what)
  }
  assert.equal(await status(sbx, net.NET_BELOW), '200')
  assert.equal(await status(sbx, net.NET_OTHER), 'curl 6')
  const { network, allowInternetAccess } = await sbx.getInfo()
  assert.deepEqual(network.allowOut, [host(net.NET_BELOW)])
  assert.equal(allowInternetAccess ?? null, null)
  let over = false
  stays.ended.then(() => (over = true))
  await Sandbox.updateNetwork(sbx.sandboxId, { allowOut: [] }) // all is open again
  assert.equal(await status(sbx, net.NET_OTHER), '200')
  assert.equal(over, false, 'what is permitted by both was broken off')
  await sbx.updateNetwork({ allowInternetAccess: false })
  assert.notEqual(await within(stays.ended, 'the last one'), 0)
  assert.equal((await sbx.getInfo()).allowInternetAccess, false)
}))

test('a connection that is kept is decided anew', () => box({}, async (sbx) => {
  const name = host(net.NET_OTHER)
  const ask = `printf 'GET / HTTP/1.1\\r\\nHost: ${name}\\r\\n\\r\\n' >&3; read -r line <&3; echo "$line"`
  const handle = await stream(sbx, `exec 3<>/dev/tcp/${name}/80; ${ask}; until [ -e /tmp/go ]; do sleep 0.1; done; while read -r -t 1 line <&3; do :; done; ${ask}`)
  await sbx.updateNetwork({ denyOut: [ALL_TRAFFIC] })
  await sbx.files.write('/tmp/go', '')
  const r = await handle.handle.wait()
  assert.match(r.stdout, /^HTTP\/1\.1 200 OK\s+HTTP\/1\.1 403/)
}))

test('updateNetwork refuses what it cannot do', async () => {
  await box({}, async (sbx) => {
    for (const [network, text] of [
      [{ denyOut: ['example.com'] }, /network\.denyOut/],
      [{ allowOut: ['example.com'] }, /0\.0\.0\.0\/0/],
      [{ egressProxy: { address: 'proxy.example' } }, /network\.egressProxy\.address is not the address of a SOCKS5 proxy/],
      [{ egressProxy: { address: '127.0.0.1:1080' } }, /network\.egressProxy is not permitted/],
      [{ egressProxy: { address: '10.0.0.1:1080' } }, /network\.egressProxy is not permitted/],
      [{ rules: { '*': authorization('x') } }, /network\.rules/],
    ]) {
      await assert.rejects(sbx.updateNetwork(network), (e) => e instanceof SandboxError && text.test(e.message))
    }
  })
  await assert.rejects(Sandbox.updateNetwork('inone', {}), SandboxNotFoundError)
})

test('rules set headers over TLS, and tell nobody', () => box({ network: { rules: { [host(net.NET_SECURE)]: authorization(net.NET_SECRET), 'closed.airlock.test': authorization(net.NET_SECRET) } } }, async (sbx) => {
  assert.equal(await body(sbx, `${net.NET_SECURE}/authorization`), digest(net.NET_SECRET))
  assert.equal((await sbx.commands.run(`curl -s -H 'Authorization: mine' '${net.NET_SECURE}/authorization'`)).stdout, digest(net.NET_SECRET))
  assert.equal(await body(sbx, `${net.NET_OPEN}/authorization`), digest('')) // in the clear
  assert.equal(await status(sbx, net.NET_SECURE_CLOSED), '403')
  const { network } = await sbx.getInfo()
  assert.deepEqual(JSON.parse(JSON.stringify(network.rules)), { 'open.airlock.test': authorization('(hidden)'), 'closed.airlock.test': authorization('(hidden)') })
  assert.equal((await sbx.commands.run(`env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'`)).stdout.includes(net.NET_SECRET), false)

  const other = net.NET_SECRET + '-another'
  await sbx.updateNetwork({ rules: { '*.airlock.test': authorization(other) } })
  assert.equal(await body(sbx, `${net.NET_SECURE}/authorization`), digest(other))
  await sbx.updateNetwork({ rules: { '*.airlock.test': authorization(other), 'open.airlock.test': [{}] } }) // its own rule wins
  assert.equal(await body(sbx, `${net.NET_SECURE}/authorization`), digest(''))
  await sbx.updateNetwork({})
  assert.equal(await body(sbx, `${net.NET_SECURE}/authorization`), digest(''))
}))

test('egressProxy: all connections by a proxy of the client', async () => {
  const username = 'user-of-the-proxy-js'
  const proxy = { address: net.NET_PROXY, username, password: net.NET_PROXY_PASSWORD }
  const asked = async () => (await fetch(`${net.NET_PROXY_ASKED}?user=${username}`)).json()
  await box({ network: { egressProxy: proxy, denyOut: ['192.0.2.20'] } }, async (sbx) => {
    assert.match(await body(sbx, net.NET_OPEN), /hello from open/)
    assert.equal(await status(sbx, net.NET_SECURE), '200')
    assert.match((await sbx.commands.run(`head -1 < /dev/tcp/open.airlock.test/${net.NET_TCP_PORT}`)).stdout, /hello/)
    // It is asked for the addresses that were decided on, and for what is denied never.
    assert.equal(await status(sbx, net.NET_CLOSED), '403')
    assert.equal(await status(sbx, 'http://169.254.169.254'), '403')
    assert.deepEqual(await asked(), ['80', '443', net.NET_TCP_PORT].map((port) => `${net.NET_OPEN_ADDRESS}:${port}`).sort())
    assert.deepEqual((await sbx.getInfo()).network.egressProxy, { address: net.NET_PROXY, username: '(hidden)' })
    const inside = await sbx.commands.run(`env; cat /etc/resolv.conf /etc/hosts; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'`)
    assert.doesNotMatch(inside.stdout, new RegExp(`${net.NET_PROXY_PASSWORD}|${username}|proxy\\.airlock`))

    // What is open goes on by the same proxy, and not by another one.
    const streaming = await stream(sbx, events(net.NET_OTHER))
    let over = false
    streaming.ended.then(() => (over = true))
    await sbx.updateNetwork({ egressProxy: proxy })
    assert.equal(await status(sbx, net.NET_BELOW), '200')
    assert.equal(over, false, 'the same proxy again broke it off')
    await asked()
    await sbx.updateNetwork({})
    assert.notEqual(await within(streaming.ended, 'a stream by a proxy of before'), 0)
    assert.equal(await status(sbx, net.NET_OPEN), '200')
    assert.equal(await status(sbx, net.NET_SECURE), '200')
    assert.deepEqual(await asked(), [], 'it goes by a proxy of before')
    assert.equal((await sbx.getInfo()).network.egressProxy, undefined)

    // There is no way around one that fails, or that the operator forbids.
    for (const [egressProxy, code, text] of [
      [{ ...proxy, password: 'wrong' }, '502', /by the proxy of the sandbox's client: .*authentication failed/],
      [{ ...proxy, address: net.NET_PROXY_DEAD }, '502', /reach the proxy of the sandbox's client: connect: connection refused/],
      [{ ...proxy, address: 'none.airlock.test:1080' }, '502', /its name does not resolve/],
      [{ ...proxy, address: net.NET_PROXY_TLS }, '50[24]', /by the proxy of the sandbox's client/],
      [{ ...proxy, address: net.NET_PROXY_CLOSED }, '403', /network\.egressProxy\) may not be connected to/],
    ]) {
      await sbx.updateNetwork({ egressProxy })
      const r = await sbx.commands.run(`curl -s -m 20 -i '${net.NET_OPEN}'; curl -s -m 20 -o /dev/null -w '%{http_code}' '${net.NET_SECURE}'`)
      assert.match(r.stdout, new RegExp(`^HTTP/1.1 ${code} `), egressProxy.address)
      assert.match(r.stdout, new RegExp(`${code}$`), egressProxy.address)
      assert.match(r.stdout, text)
      assert.doesNotMatch(r.stdout, new RegExp(`${net.NET_PROXY_PASSWORD}|${username}|proxy\\.airlock|:1080|192\\.0\\.2`))
      await assert.rejects(sbx.commands.run(`head -1 < /dev/tcp/open.airlock.test/${net.NET_TCP_PORT}`))
    }
    assert.deepEqual(await asked(), ['a wrong password'])
  })
})
