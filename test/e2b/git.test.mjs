// The git module of the unmodified JavaScript SDK. There is no network: what
// is cloned and pushed to is in the sandbox, by path, by file:// and by http.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { after, before, describe, test } from 'node:test'
import { CommandExitError, GitAuthError, GitUpstreamError, InvalidArgumentError, Sandbox } from 'e2b'

const up = '/home/user/up.git'
const repo = '/home/user/repo'

describe('git', () => {
  let sbx, git, files
  const sh = async (line) => (await sbx.commands.run(line, { cwd: repo })).stdout.trim()
  before(async () => {
    sbx = await Sandbox.create({ timeoutMs: 180_000 })
    ;({ git, files } = sbx)
  })
  after(async () => {
    await sbx?.kill()
  })

  test('init, configureUser, setConfig, getConfig', async () => {
    await git.init(up, { bare: true, initialBranch: 'main' })
    await git.init(repo, { initialBranch: 'main' })
    await git.configureUser('Ann', 'ann@example.com')
    assert.equal(await git.getConfig('user.name'), 'Ann')
    await git.configureUser('Repo Ann', 'repo@example.com', { scope: 'local', path: repo })
    assert.equal(await git.getConfig('user.email', { scope: 'local', path: repo }), 'repo@example.com')
    assert.equal(await git.getConfig('user.email'), 'ann@example.com')
    await git.setConfig('pull.rebase', 'false', { scope: 'local', path: repo })
    assert.equal(await git.getConfig('pull.rebase', { scope: 'local', path: repo }), 'false')
    await git.setConfig('core.pager', 'cat', { scope: 'system', user: 'root' })
    assert.equal(await git.getConfig('core.pager', { scope: 'system' }), 'cat')
    assert.equal(await git.getConfig('no.such'), undefined)
    await assert.rejects(git.getConfig('a.b', { scope: 'local' }), InvalidArgumentError)
  })

  test('status, add, commit', async () => {
    await files.write(`${repo}/a b.txt`, 'one\n')
    await files.write(`${repo}/é.txt`, 'é\n')
    let s = await git.status(repo)
    assert.deepEqual([s.currentBranch, s.isClean, s.hasUntracked, s.untrackedCount, s.stagedCount], ['main', false, true, 2, 0])
    await git.add(repo, { files: ['a b.txt'] })
    s = await git.status(repo)
    assert.deepEqual([s.hasStaged, s.stagedCount, s.untrackedCount], [true, 1, 1])
    assert.deepEqual(s.fileStatus.map((f) => [f.status, f.staged]), [['added', true], ['untracked', false]])
    await git.commit(repo, "it's the \"first\"\n\nand a body")
    assert.equal(await sh('git log -1 --format=%B'), 'it\'s the "first"\n\nand a body')
    await git.add(repo)
    await git.commit(repo, 'second', { authorName: 'Bob', authorEmail: 'bob@example.com' })
    assert.equal(await sh('git log -1 --format="%an <%ae> %cn"'), 'Bob <bob@example.com> Bob')
    await git.commit(repo, 'empty', { allowEmpty: true })
    assert.equal((await git.status(repo)).isClean, true)
    await assert.rejects(git.commit(repo, 'nothing'), (e) => e instanceof CommandExitError && e.exitCode === 1 && /nothing to commit/.test(e.stdout))
    await assert.rejects(git.status('/home/user/none'), (e) => e instanceof CommandExitError && e.exitCode === 128)
  })

  test('branches', async () => {
    await git.createBranch(repo, 'side')
    assert.deepEqual(await git.branches(repo), { currentBranch: 'side', branches: ['main', 'side'] })
    await git.checkoutBranch(repo, 'main')
    await git.deleteBranch(repo, 'side')
    await git.createBranch(repo, 'more')
    await git.commit(repo, 'only here', { allowEmpty: true })
    await git.checkoutBranch(repo, 'main')
    await assert.rejects(git.deleteBranch(repo, 'more'), CommandExitError)
    await git.deleteBranch(repo, 'more', { force: true })
    assert.deepEqual((await git.branches(repo)).branches, ['main'])
    await assert.rejects(git.checkoutBranch(repo, 'no-such'), CommandExitError)
  })

  test('restore and reset', async () => {
    const change = () => files.write(`${repo}/a b.txt`, 'changed\n')
    await change()
    await git.restore(repo, { paths: ['a b.txt'] })
    assert.equal(await files.read(`${repo}/a b.txt`), 'one\n')
    await change()
    await git.add(repo)
    await git.restore(repo, { paths: ['a b.txt'], staged: true, worktree: true, source: 'HEAD' })
    assert.equal((await git.status(repo)).isClean, true)
    await change()
    await git.add(repo)
    await git.reset(repo, { paths: ['a b.txt'] })
    assert.equal((await git.status(repo)).unstagedCount, 1)
    await git.reset(repo, { mode: 'hard', target: 'HEAD' })
    assert.equal((await git.status(repo)).isClean, true)
    await git.reset(repo, { mode: 'soft', target: 'HEAD~1' })
    assert.equal(await sh('git log -1 --format=%s'), 'second')
  })

  test('remotes, push, pull, clone', async () => {
    assert.equal(await git.remoteGet(repo, 'origin'), undefined)
    await git.remoteAdd(repo, 'origin', '/home/user/elsewhere')
    await git.remoteAdd(repo, 'origin', `file://${up}`, { overwrite: true })
    assert.equal(await git.remoteGet(repo, 'origin'), `file://${up}`)
    await assert.rejects(git.pull(repo), GitUpstreamError)
    await git.push(repo, { remote: 'origin', branch: 'main', setUpstream: true })
    await git.clone(`file://${up}`, { path: '/home/user/copy', branch: 'main', depth: 1 })
    assert.equal((await sbx.commands.run('git rev-list --count HEAD', { cwd: '/home/user/copy' })).stdout, '1\n')
    await git.clone(up) // into a directory of its name
    assert.equal(await files.read('up/é.txt'), 'é\n')
    await files.write(`${repo}/c.txt`, 'c\n')
    await git.add(repo)
    await git.commit(repo, 'third')
    const s = await git.status(repo)
    assert.deepEqual([s.upstream, s.ahead, s.behind], ['origin/main', 1, 0])
    await git.push(repo)
    await git.pull('/home/user/copy')
    assert.equal(await files.read('copy/c.txt'), 'c\n')
    await git.pull('/home/user/up', { remote: 'origin', branch: 'main' })
    await git.remoteAdd(repo, 'again', up, { fetch: true })
    assert.match(await sh('git branch -r'), /again\/main/)
    await assert.rejects(git.clone('/home/user/none.git'), (e) => e instanceof CommandExitError && /does not exist/.test(e.stderr))
  })

  test('a password, given and stored', async () => {
    const url = 'http://127.0.0.1:8090/up.git'
    const ann = { username: 'ann', password: 'token' }
    await files.write('gitserver.py', readFileSync(new URL('gitserver.py', import.meta.url), 'utf8'))
    await sbx.commands.run('git config http.receivepack true', { cwd: up })
    await sbx.commands.run('python3 gitserver.py /home/user', { background: true, timeoutMs: 0 })
    await sbx.commands.run('until (echo > /dev/tcp/127.0.0.1/8090) 2>/dev/null; do sleep 0.1; done')
    await assert.rejects(git.clone(url, { path: '/home/user/w' }), GitAuthError)
    await assert.rejects(git.clone(url, { path: '/home/user/w', username: 'ann', password: 'wrong' }), GitAuthError)
    await git.clone(url, { path: '/home/user/w', ...ann })
    assert.equal(await git.remoteGet('/home/user/w', 'origin'), url) // the password is not kept
    await git.clone(url, { path: '/home/user/kept', ...ann, dangerouslyStoreCredentials: true })
    assert.equal(await git.remoteGet('/home/user/kept', 'origin'), 'http://ann:token@127.0.0.1:8090/up.git')
    await files.write('w/d.txt', 'd\n')
    await git.add('/home/user/w')
    await git.commit('/home/user/w', 'fourth')
    await assert.rejects(git.push('/home/user/w', { remote: 'origin', branch: 'main' }), GitAuthError)
    await git.push('/home/user/w', { remote: 'origin', branch: 'main', ...ann })
    await git.pull('/home/user/kept')
    assert.equal(await files.read('kept/d.txt'), 'd\n')
    await assert.rejects(git.pull('/home/user/w'), GitAuthError)
    await git.pull('/home/user/w', ann)
    await git.dangerouslyAuthenticate({ ...ann, host: '127.0.0.1:8090', protocol: 'http' })
    await git.pull('/home/user/w')
    await git.clone(url, { path: '/home/user/stored' })
    await assert.rejects(git.clone(url, { password: 'alone' }), InvalidArgumentError)
  })
})
