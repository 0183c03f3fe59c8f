// The unmodified JavaScript SDK against a server that has room for one sandbox.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { RateLimitError, Sandbox } from 'e2b'

test('a server with no room refuses, and a retry gets in', async () => {
  const first = await Sandbox.create({ timeoutMs: 60_000 })
  try {
    await assert.rejects(Sandbox.create({ retries: 0 }), (e) => e instanceof RateLimitError && e.statusCode === 429 && /not enough memory/.test(e.message))
    const second = Sandbox.create({ timeoutMs: 60_000, retries: 1 })
    await first.kill()
    assert.equal(await (await second).kill(), true)
  } finally {
    await first.kill()
  }
})
