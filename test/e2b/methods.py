"""Prints the public methods of the Python SDK, one a line: what
docs/e2b.md must have. The asyncio classes count as their blocking twins."""

import inspect

import e2b
from e2b.sandbox_async import git as git_async
from e2b.sandbox_async.commands import command as command_async, pty as pty_async
from e2b.sandbox_async.filesystem import filesystem as filesystem_async
from e2b.sandbox_sync import git as git_sync
from e2b.sandbox_sync.commands import command as command_sync, pty as pty_sync
from e2b.sandbox_sync.filesystem import filesystem as filesystem_sync
from e2b.template import main as template

for name, classes in {
    "Sandbox": [e2b.Sandbox, e2b.AsyncSandbox],
    "commands": [command_sync.Commands, command_async.Commands],
    "CommandHandle": [e2b.CommandHandle, e2b.AsyncCommandHandle],
    "AsyncCommandInputHandle": [e2b.AsyncCommandInputHandle],
    "pty": [pty_sync.Pty, pty_async.Pty],
    "files": [filesystem_sync.Filesystem, filesystem_async.Filesystem],
    "WatchHandle": [e2b.WatchHandle, e2b.AsyncWatchHandle],
    "git": [git_sync.Git, git_async.Git],
    "Template": [e2b.Template, e2b.AsyncTemplate, template.TemplateBuilder, template.TemplateFinal],
    "Volume": [e2b.Volume, e2b.AsyncVolume],
    "Secret": [e2b.Secret, e2b.AsyncSecret],
    "Paginator": [
        e2b.SandboxPaginator, e2b.AsyncSandboxPaginator, e2b.SnapshotPaginator, e2b.AsyncSnapshotPaginator,
        e2b.SecretPaginator, e2b.AsyncSecretPaginator,
    ],
}.items():
    methods = set()
    for cls in classes:
        methods |= {n for n, m in inspect.getmembers(cls, callable) if not n.startswith("_") and not inspect.isclass(m)}
    for method in sorted(methods):
        print(f"{name}.{method}")
