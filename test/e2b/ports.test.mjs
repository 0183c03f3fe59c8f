// Ports of sandboxes, with the unmodified SDK and nothing set but E2B_DOMAIN,
// E2B_API_KEY and the authority to trust: TLS, HTTP/2, a host for each port.
import assert from 'node:assert/strict'
import http from 'node:http'
import https from 'node:https'
import { createHash, randomBytes } from 'node:crypto'
import { after, before, describe, test } from 'node:test'
import './resolve.mjs'

const domain = process.env.E2B_DOMAIN
assert.ok(domain, 'E2B_DOMAIN is not set')
assert.equal(process.env.E2B_API_URL ?? '', '')
const { Sandbox } = await import('e2b')

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

// request asks without fetch, which hides what breaks and cannot upgrade.
const request = (url, headers = {}, body) =>
  new Promise((resolve, reject) => {
    const req = (url.startsWith('https:') ? https : http).request(url, { headers, method: body === undefined ? 'GET' : 'POST', agent: false })
    req.on('error', reject)
    req.on('upgrade', (res, socket) => resolve({ res, socket }))
    req.on('response', (res) => resolve({ res }))
    req.end(body)
  })
const text = async (url, headers, body) => {
  const { res } = await request(url, headers, body)
  let all = ''
  for await (const part of res) all += part
  return { status: res.statusCode, headers: res.headers, body: all }
}

// Standard Python only: an event stream, a WebSocket that echoes, what came in.
const program = `
import base64, hashlib, http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        if self.path == '/events':
            self.send_response(200); self.send_header('Content-Type', 'text/event-stream'); self.send_header('Connection', 'close'); self.end_headers()
            for i in range(1000):
                self.wfile.write(b'data: %d\\n\\n' % i); self.wfile.flush(); time.sleep(0.3)
        elif self.path == '/ws':
            key = self.headers['Sec-WebSocket-Key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11'
            self.send_response(101); self.send_header('Upgrade', 'websocket'); self.send_header('Connection', 'Upgrade')
            self.send_header('Sec-WebSocket-Accept', base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()); self.end_headers()
            while True:
                head = self.rfile.read(2)
                if len(head) < 2 or head[0] & 15 == 8: break
                mask = self.rfile.read(4)
                data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(head[1] & 127)))
                self.wfile.write(bytes([0x81, len(data)]) + data); self.wfile.flush()
            self.close_connection = True
        else:
            self.answer(repr([self.path, self.headers['Host'], sorted(k.lower() for k in self.headers)]).encode())
    def do_POST(self):
        n, h = int(self.headers['Content-Length']), hashlib.sha256()
        while n > 0:
            part = self.rfile.read(min(n, 1 << 16)); h.update(part); n -= len(part)
        self.answer(h.hexdigest().encode())
    def answer(self, body):
        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers(); self.wfile.write(body)
http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
`

const serve = async (sbx, port) => {
  await sbx.files.write('server.py', program)
  await sbx.commands.run(`python3 server.py ${port}`, { background: true, timeoutMs: 0 })
  await open(sbx, port)
}
const open = async (sbx, port, headers) => {
  for (let i = 0; i < 100; i++) {
    if ((await text(`https://${sbx.getHost(port)}/`, headers)).status !== 502) return
    await sleep(100)
  }
  assert.fail(`port ${port} does not open`)
}

// frame is a masked text frame of a WebSocket's client.
const frame = (s) => {
  const mask = randomBytes(4)
  const data = Buffer.from(s).map((b, i) => b ^ mask[i % 4])
  return Buffer.concat([Buffer.from([0x81, 0x80 | data.length]), mask, data])
}
const upgrade = async (url) => {
  const key = randomBytes(16).toString('base64')
  const { res, socket } = await request(url, { Connection: 'Upgrade', Upgrade: 'websocket', 'Sec-WebSocket-Version': '13', 'Sec-WebSocket-Key': key })
  assert.equal(res.statusCode, 101)
  assert.equal(res.headers['sec-websocket-accept'], createHash('sha1').update(key + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest('base64'))
  return socket
}
const broken = (stream) =>
  new Promise((resolve) => {
    stream.on('error', resolve)
    stream.on('close', resolve)
    stream.on('aborted', resolve)
    stream.resume()
  })

describe('one sandbox', () => {
  let sbx, url
  before(async () => {
    sbx = await Sandbox.create({ timeoutMs: 120_000 })
    await serve(sbx, 8000)
    url = `https://${sbx.getHost(8000)}`
  })
  after(async () => {
    await sbx?.kill()
  })

  test('the host of a port', () => {
    assert.equal(sbx.getHost(8000), `8000-${sbx.sandboxId}.${domain}`)
  })

  test('a command and a file, by the same domain', async () => {
    assert.equal((await sbx.commands.run('echo hi')).stdout, 'hi\n')
    await sbx.files.write('a.txt', 'contents')
    assert.equal(await sbx.files.read('a.txt'), 'contents')
    assert.equal(await (await fetch(await sbx.downloadUrl('a.txt'))).text(), 'contents')
    assert.equal((await fetch(await sbx.uploadUrl('b.txt'), { method: 'POST', body: 'more', headers: { 'Content-Type': 'application/octet-stream' } })).status, 200)
    assert.equal(await sbx.files.read('b.txt'), 'more')
  })

  test('python -m http.server', async () => {
    await sbx.files.write('www/index.html', '<p>hello</p>')
    await sbx.commands.run('python3 -m http.server 8001 --directory www', { background: true, timeoutMs: 0 })
    await open(sbx, 8001)
    const reply = await fetch(`https://${sbx.getHost(8001)}/index.html`)
    assert.equal(reply.status, 200)
    assert.equal(await reply.text(), '<p>hello</p>')
    assert.equal(reply.headers.get('content-type'), 'text/html')
  })

  test('what the program sees', async () => {
    const seen = await text(`${url}/a%2Fb?c=d;e`, {
      'X-API-KEY': 'k', 'X-Access-Token': 't', 'E2B-Traffic-Access-Token': 'tt', 'E2b-Sandbox-Id': 'x', 'E2b-Sandbox-Port': '1', Authorization: 'its own',
    })
    assert.equal(seen.body, `['/a%2Fb?c=d;e', '${sbx.getHost(8000)}', ['authorization', 'host', 'x-forwarded-for', 'x-forwarded-host', 'x-forwarded-proto']]`)
  })

  test('a large upload', async () => {
    const body = randomBytes(8 << 20)
    assert.equal((await text(url, { 'Content-Length': body.length }, body)).body, createHash('sha256').update(body).digest('hex'))
  })

  test('events come one by one', async () => {
    const { res } = await request(`${url}/events`)
    let seen = ''
    for await (const part of res) {
      seen += part
      if (seen.includes('data: 2\n\n')) break
    }
    assert.equal(seen, 'data: 0\n\ndata: 1\n\ndata: 2\n\n')
  })

  test('a WebSocket', async () => {
    const socket = await upgrade(`${url}/ws`)
    for (const word of ['one', 'two']) {
      socket.write(frame(word))
      const [answer] = await new Promise((resolve) => socket.once('data', (d) => resolve([d])))
      assert.deepEqual(answer, Buffer.concat([Buffer.from([0x81, word.length]), Buffer.from(word)]))
    }
    socket.destroy()
  })

  test('a closed port', async () => {
    const reply = await text(`https://${sbx.getHost(8002)}/`)
    assert.equal(reply.status, 502)
    assert.deepEqual(JSON.parse(reply.body), { sandboxId: sbx.sandboxId, message: 'The sandbox is running but port is not open', port: 8002, code: 502 })
  })

  test('a preview host has no API, and the API no preview', async () => {
    const key = { 'X-API-KEY': process.env.E2B_API_KEY }
    assert.match((await text(`${url}/v2/sandboxes`, key)).body, /^\['\/v2\/sandboxes'/)
    assert.equal((await text(`https://api.${domain}/v2/sandboxes`, key)).status, 200)
    assert.equal((await text(`https://${sbx.getHost(49999)}/`)).status, 502)
    assert.equal((await text(`https://${sbx.getHost(49983)}/envs`)).status, 401)
  })
})

test('a sandbox that is not public', async () => {
  const sbx = await Sandbox.create({ timeoutMs: 60_000, network: { allowPublicTraffic: false, maskRequestHost: 'localhost:${PORT}' } })
  try {
    assert.ok(sbx.trafficAccessToken)
    const url = `https://${sbx.getHost(8000)}/`
    assert.equal((await text(url)).status, 403)
    await sbx.files.write('server.py', program)
    await sbx.commands.run('python3 server.py 8000', { background: true, timeoutMs: 0 })
    const headers = { 'E2B-Traffic-Access-Token': sbx.trafficAccessToken }
    await open(sbx, 8000, headers)
    assert.match((await text(url, headers)).body, /^\['\/', 'localhost:8000'/)
    assert.equal((await text(url, { 'E2B-Traffic-Access-Token': 'wrong' })).status, 403)
    assert.equal((await Sandbox.connect(sbx.sandboxId)).trafficAccessToken, sbx.trafficAccessToken)
  } finally {
    await sbx.kill()
  }
})

test('the end of a sandbox breaks what is open', async () => {
  const sbx = await Sandbox.create({ timeoutMs: 60_000 })
  await serve(sbx, 8000)
  const url = `https://${sbx.getHost(8000)}`
  const { res } = await request(`${url}/events`)
  const socket = await upgrade(`${url}/ws`)
  const ends = [broken(res), broken(socket)]
  await sbx.kill()
  await Promise.all(ends)
  assert.equal(res.complete, false)
  const reply = await text(url)
  assert.equal(reply.status, 502)
  assert.deepEqual(JSON.parse(reply.body), { sandboxId: sbx.sandboxId, message: 'The sandbox was not found', code: 502 })
})
