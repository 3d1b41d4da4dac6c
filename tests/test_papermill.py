"""The job as its user starts it: papermill from the shell, inside nbs/ too; and what it leaves behind."""
import json, subprocess, sys
from procs import ROOT, Marked

PAPERMILL = [sys.executable, '-m', 'papermill']

def job(*args, out, cwd=ROOT, nb='nbs/20_async_loop.ipynb'): return Marked([*PAPERMILL, nb, str(out), '--log-output', '--no-progress-bar', *args], cwd=cwd)

def test_users_own_line_inside_nbs(tmp_path):
    "`papermill 20_async_loop.ipynb out.ipynb -p model tiny` in nbs/ works, and a later export does not take out.ipynb for source."
    out = ROOT/'nbs'/'out.ipynb'; module = ROOT/'molt_nb'/'async_loop.py'; before = module.read_text()
    try:
        with job('-p', 'model', 'tiny', '-p', 'steps', '3', '-p', 'out_dir', str(tmp_path/'run'), out=out.name, cwd=ROOT/'nbs', nb='20_async_loop.ipynb') as j:
            assert j.p.wait(600) == 0, j.out()[-3000:]
            assert j.left(120) == {}
            assert 'step   3/3' in j.out()
        lines = [json.loads(l) for l in (tmp_path/'run'/'metrics.jsonl').read_text().splitlines()]
        assert len(lines) == 3 and lines[0]['mismatch/abs_log_max'] <= 1e-4 and all(l['sync/mismatch'] <= 1e-4 for l in lines)
        nb = json.loads(out.read_text())
        for c in nb['cells']:                               # out.ipynb now says something else than the source
            if '#| export' in ''.join(c['source']): c['source'] = [*c['source'], '\npoisoned = True']
        out.write_text(json.dumps(nb))
        subprocess.run([sys.executable, 'tests/notebooks.py', 'export'], cwd=ROOT, check=True)
        assert module.read_text() == before
    finally: out.unlink(missing_ok=True)
