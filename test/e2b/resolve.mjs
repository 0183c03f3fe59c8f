// A resolver for the names below E2B_DOMAIN, which not every system has.
// Import it before the SDK.
import dns from 'node:dns'

const domain = process.env.E2B_DOMAIN.split(':')[0]
const { lookup } = dns
dns.lookup = (name, options, callback) => {
  if (typeof options === 'function') [options, callback] = [{}, options]
  if (!name.endsWith(domain)) return lookup(name, options, callback)
  if (options.all) return process.nextTick(callback, null, [{ address: '127.0.0.1', family: 4 }])
  process.nextTick(callback, null, '127.0.0.1', 4)
}
