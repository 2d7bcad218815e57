"""
The pages of the site for users, run as a reader would run them, on a real cluster.

`page` parses a page into steps, `output` compares a command's output with the page, `shell` runs
commands in one bash session, `test_pages` runs every page: `make e2e-docs`.

The front matter of a page has `test: {needs: nothing | installed | simulated}`, and optionally
`nodes: 2` (drakit runs on one node otherwise) and `programs: [sample-device-plugin]` (images of
others that the nodes need). Its blocks:

* ```bash``` runs; with the title "On the node" it runs on the first node, as root. A block whose
  commands only read (`kubectl get`, `describe`, `logs`, ...) is repeated until it fits the page.
* ```text title="Output"``` is the output of the block before it.
* A block with a file's name as its title is saved. YAML without a title is applied with
  `--dry-run=server`.
* A comment before a block: `<!-- not run: REASON -->`, or `<!-- fails -->` for commands that end
  with an error. `<!-- run: COMMANDS -->` hides commands from the reader, on one or several lines.

The working folder contains `charts` and `examples`, like a clone.
"""
