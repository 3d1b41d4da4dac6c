"""Notebook 20 in JupyterLab, in a real headless browser: open, run, edit the estimator between two steps, go on, keep a picture.

    make test-lab       needs a Chromium (CHROMIUM=path, else found on PATH) and the package playwright (make installs it)

Works on a copy in runs/, because JupyterLab saves what it opens."""
import json, os, secrets, shutil, socket, subprocess, sys, tempfile, time, urllib.request
from pathlib import Path
from notebooks import NBS, ROOT
from procs import Marked

EDIT = '''import torch
from molt_nb import estimators
@estimators.estimator
def grpo(rollouts, rows): return torch.zeros(rows.tokens.shape)
print('gradient after the edit:', (await run.step())['policy/grad_norm'])'''
OUTPUTS = '''() => { const out = []; for (const c of window.jupyterapp.shell.currentWidget.content.model.cells) { if (c.type !== 'code') continue; const o = c.outputs.toJSON();
  out.push({source: c.sharedModel.getSource(), n: c.executionCount, error: o.filter(x => x.output_type === 'error').map(x => x.ename + ': ' + x.evalue).join(), kinds: o.flatMap(x => Object.keys(x.data ?? {})), text: o.map(x => [x.text ?? ''].flat().join('')).join('')}); } return out; }'''

def chromium():
    found = os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
    return found or sys.exit('no Chromium on PATH: install one (Debian: apt install chromium), or write CHROMIUM=/path/to/chromium')

def copy_of_notebook(folder, steps=4):
    nb = json.loads((NBS/'20_async_loop.ipynb').read_text())
    for c in nb['cells']:
        if c['cell_type'] == 'code': c.update(outputs=[], execution_count=None)
        if 'parameters' in c['metadata'].get('tags', []): c['source'] = [f'model, steps, seed, out_dir, overrides = "tiny", {steps}, 0, {str(folder/"run")!r}, ""']
    nb['cells'] = [c for c in nb['cells'] if 'skip-execution' not in c['metadata'].get('tags', [])]
    (folder/'20_async_loop.ipynb').write_text(json.dumps(nb))

def run_in_browser(page, url, path, picture):
    do = lambda command: page.evaluate('async c => { await window.jupyterapp.commands.execute(c); }', command)
    page.goto(f'{url}/lab/tree/{path}?token={TOKEN}&reset'); page.wait_for_selector('.jp-NotebookPanel .jp-Notebook .jp-Cell')
    page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.context?.sessionContext?.session?.kernel?.status === 'idle'")
    sources = [c['source'] for c in page.evaluate(OUTPUTS)]
    page.evaluate('''text => { const nb = window.jupyterapp.shell.currentWidget.content; nb.activeCellIndex = nb.widgets.findIndex(w => w.model.sharedModel.getSource().startsWith(text)); }''', 'after = await run.answers()')
    news = page.get_by_role('button', name='No', exact=True)
    if news.count(): news.click()
    do('notebook:run-all-above')                                    # the job, up to its last step
    do('notebook:insert-cell-above'); do('notebook:enter-edit-mode'); page.keyboard.insert_text(EDIT); do('notebook:run-cell')
    do('notebook:run-all-below')
    cells = page.evaluate(OUTPUTS); by = lambda start: next(c for c in cells if c['source'].startswith(start))
    bad = [c for c in cells if c['error'] or c['n'] is None]
    for c in bad: print('FAILED:', c['source'].splitlines()[0], '->', c['error'] or 'did not run')
    edited = by('import torch\nfrom molt_nb import estimators')['text'].strip(); print(by('while seconds_left(')['text'].strip()); print(edited)
    page.evaluate('''async () => { const nb = window.jupyterapp.shell.currentWidget.content; const i = nb.widgets.findIndex(w => w.model.sharedModel.getSource().startsWith("import torch\\nfrom molt_nb import estimators"));
        nb.activeCellIndex = i; await nb.scrollToItem(i, 'start'); }''')       # cells out of sight are not drawn
    page.wait_for_timeout(3000); page.screenshot(path=picture)
    images = sum('image/png' in c['kinds'] for c in cells)
    assert not bad and len(cells) == len(sources) + 1 and edited.endswith(': 0.0') and images >= 2, (len(bad), edited, images)
    print(f'{len(cells)} passed, 0 failed ({images} pictures in the notebook)')

if __name__ == '__main__':
    from playwright.sync_api import sync_playwright
    browser, folder = chromium(), ROOT/'runs'/f'lab-{time.strftime("%Y%m%d-%H%M%S")}'; folder.mkdir(parents=True); copy_of_notebook(folder)
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    TOKEN, url = secrets.token_hex(16), f'http://127.0.0.1:{port}'
    server = [sys.executable, '-m', 'jupyter', 'lab', '--no-browser', '--ip=127.0.0.1', f'--port={port}', f'--IdentityProvider.token={TOKEN}', f'--ServerApp.root_dir={ROOT}',
              '--LabApp.expose_app_in_browser=True', '--LabApp.news_url=None', *(['--allow-root'] if os.geteuid() == 0 else [])]
    with Marked(server, cwd=ROOT, MPLBACKEND='module://matplotlib_inline.backend_inline') as lab:
        for _ in range(120):
            try: urllib.request.urlopen(f'{url}/api?token={TOKEN}', timeout=2); break
            except OSError: time.sleep(.5)
        with sync_playwright() as p, tempfile.TemporaryDirectory() as profile:
            context = p.chromium.launch_persistent_context(profile, executable_path=browser, headless=True, viewport=dict(width=1300, height=1000), args=['--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-background-networking'])
            context.set_default_timeout(300_000)
            try: run_in_browser(context.pages[0], url, str((folder/'20_async_loop.ipynb').relative_to(ROOT)), str(folder/'jupyterlab.png'))
            finally: context.close()
        lab.p.terminate(); lab.p.wait(30)
        assert lab.left(120) == {}, lab.left(0)
    print('picture:', (folder/'jupyterlab.png').relative_to(ROOT))
