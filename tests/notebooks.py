"""Work on the notebooks as a whole:  python tests/notebooks.py guard | check | execute 'GLOB' | readme

guard    refuses to export while a notebook that papermill wrote lies in nbs/ under a chapter's name
check    fails if a notebook is not clean or if molt_nb/ is not what the notebooks export; changes nothing
execute  runs notebooks in a fresh kernel, keeps their outputs, cleans them, exports them
readme   writes README.md from nbs/index.ipynb"""
import json, os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent; NBS = ROOT/'nbs'
CHAPTER = re.compile(r'^(\d\d_.*|index)\.ipynb$')     # only these are source; `out.ipynb` is not

def chapters(glob='*'): return [p for p in sorted(NBS.glob(f'{glob.removesuffix(".ipynb")}.ipynb')) if CHAPTER.match(p.name)]

def guard():
    bad = [p.name for p in chapters() if 'papermill' in json.loads(p.read_text())['metadata']]
    if bad: sys.exit(f"written by papermill, not source: nbs/{', nbs/'.join(bad)}. Move it to runs/")

def tidy(path):
    "Clean as nbdev does, plus what a reader does not need: warnings on stderr and paths of this machine."
    nb = json.loads(path.read_text())
    for c in nb['cells']:
        if c['cell_type'] != 'code': continue
        c['outputs'] = [o for o in c['outputs'] if o.get('name') != 'stderr' and 'application/vnd.jupyter.widget-view+json' not in o.get('data', {})]
        prints = [o for o in c['outputs'] if o['output_type'] == 'stream']
        if len(prints) == len(c['outputs']) > 1: c['outputs'] = [{**prints[0], 'text': [line for o in prints for line in o['text']]}]     # a progress line each: one output
    path.write_text(json.dumps(nb, indent=1, ensure_ascii=False).replace(f'{ROOT}/', '') + '\n')
    subprocess.run(['nbdev_clean', '--fname', str(path)], check=True, cwd=ROOT)

def execute(glob):
    for p in chapters(glob):
        subprocess.run(['jupyter', 'nbconvert', '--log-level=WARN', '--to', 'notebook', '--execute', '--ExecutePreprocessor.timeout=1200', '--inplace', p.name], check=True, cwd=NBS)
        tidy(p)
    export()

def export(): guard(); subprocess.run(['nbdev_export', '--file_re', CHAPTER.pattern], check=True, cwd=ROOT)

def check():
    "Clean and export a copy, and compare."
    guard(); faults = []
    with tempfile.TemporaryDirectory() as d:
        copy = Path(d)/'copy'; shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.venv', '.git', 'runs', '.cache', '__pycache__', '*.egg-info'))
        shutil.rmtree(copy/'molt_nb'); (copy/'molt_nb').mkdir(); shutil.copy(ROOT/'molt_nb'/'__init__.py', copy/'molt_nb')
        env = {**os.environ, 'PYTHONPATH': str(copy)}
        for p in chapters(): subprocess.run(['nbdev_clean', '--fname', str(copy/'nbs'/p.name)], check=True, cwd=copy, env=env)
        subprocess.run(['nbdev_export', '--file_re', CHAPTER.pattern], check=True, cwd=copy, env=env)
        faults += [f'not clean: nbs/{p.name} (make run-nb NB={p.stem}, or nbdev_clean)' for p in chapters() if p.read_text() != (copy/'nbs'/p.name).read_text()]
        names = {p.name for f in (ROOT, copy) for p in (f/'molt_nb').glob('*.py')}
        def text(f): return f.read_text() if f.exists() else None
        faults += [f'out of sync: molt_nb/{n} (make export)' for n in sorted(names) if text(ROOT/'molt_nb'/n) != text(copy/'molt_nb'/n)]
    paths = re.compile(r'(^|[^\w./-])/(home|root|work)/\w')
    faults += [f'a path of one machine in an output: nbs/{p.name}' for p in chapters() if paths.search(p.read_text())]
    print('\n'.join(faults) or f'{len(chapters())} notebooks are clean and in sync'); sys.exit(bool(faults))

def readme():
    subprocess.run(['jupyter', 'nbconvert', '--log-level=WARN', '--to', 'markdown', '--output-dir', str(ROOT), '--output', 'README', str(NBS/'index.ipynb'),
                    '--TagRemovePreprocessor.enabled=True', '--TagRemovePreprocessor.remove_cell_tags=hide'], check=True)
    text = re.sub(r'\]\((evidence/|\d\d_)', r'](nbs/\1', (ROOT/'README.md').read_text())        # links as seen from the root
    text = re.sub(r'^#\| eval: false\n', '', text, flags=re.M); (ROOT/'README.md').write_text(text)

if __name__ == '__main__':
    what, *rest = sys.argv[1:] or ['check']
    {'guard': guard, 'check': check, 'execute': execute, 'readme': readme, 'export': export}[what](*rest)
