"""Every notebook's inline tests, as nbdev_test runs them but each in a fresh process, then tests/ with pytest. Closes with `N passed, N failed`.

    python tests/run_all.py             all notebooks, and tests/ but for the LONG ones (make test; what CI runs)
    python tests/run_all.py --all       with those (make test-all)
    python tests/run_all.py --long      only those (make test-long)
    python tests/run_all.py GLOB        the notebooks that GLOB picks, such as '2*'"""
import os, signal, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from notebooks import NBS, ROOT, chapters

NB_TIMEOUT, SUITE_TIMEOUT = 900, 1200      # against hanging only
JOB = '20_async_loop'                      # is a job: tests/test_papermill.py runs all of it with papermill, as its user does
LIGHT = ('test_bad_input', 'test_evidence', 'test_templates', 'test_algorithms')   # these start no Ray
LONG = ('test_environments', 'test_fleet', 'test_every_name', 'test_critic', 'test_chat', 'test_chat_server', 'test_staleness', 'test_windows')            # whole runs beyond the shortest, and abuse: families of environments, several engines and ranks, every algorithm by name, agent frameworks, ages, every way to compute a window
ONE = '''
import sys
from pathlib import Path
from nbdev.config import get_config
from nbdev.test import test_nb
ok, _ = test_nb(Path(sys.argv[1]), skip_flags=str(get_config().tst_flags).split(), basepath=sys.argv[2])
sys.exit(not ok)'''

def run(cmd, cwd, timeout):
    "Exit code, seconds and output. Whatever the command left running dies with its process group."
    with tempfile.TemporaryFile() as log:       # a file: a leftover child that holds a pipe would block the read
        t = time.time(); late = ''
        p = subprocess.Popen(cmd, cwd=cwd, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'agg'})
        try: p.wait(timeout)
        except subprocess.TimeoutExpired: late = f'\ntimed out after {timeout} s'
        finally:
            try: os.killpg(p.pid, signal.SIGKILL)
            except ProcessLookupError: pass
        p.wait(); log.seek(0)
        return 1 if late else p.returncode, time.time()-t, log.read().decode(errors='replace') + late

def report(name, result):
    code, seconds, out = result
    print(f"{'PASS' if code == 0 else 'FAIL'} {name} ({seconds:.0f} s)", flush=True)
    if code: print(out[-6000:], flush=True)
    return code != 0

def main(what='*'):
    glob = None if what in ('*', '--all', '--long') else what
    run([sys.executable, '-c', 'from molt_nb.models import model_dir; model_dir("tiny")'], ROOT, NB_TIMEOUT)      # once, with the machine to itself; a failure shows in the notebooks
    books = [] if what == '--long' else [(p.name, [sys.executable, '-c', ONE, str(p), str(ROOT)], NBS, NB_TIMEOUT) for p in chapters(glob or '*') if glob or p.stem != JOB]
    suites = [] if glob else [(f'tests/{p.name}', [sys.executable, '-m', 'pytest', '-q', str(p)], ROOT, SUITE_TIMEOUT) for p in sorted((ROOT/'tests').glob('test_*.py')) if what == '--all' or (p.stem in LONG) == (what == '--long')]
    light = [s for s in suites if Path(s[0]).stem in LIGHT]; runs = [s for s in suites if s not in light]
    bad, jobs = 0, books + suites
    for some, width in ((books + light, 2), (runs, 1)):   # whole runs one at a time: Ray gives its own agents 15 s to start, and each run wants both cores
        with ThreadPoolExecutor(width) as ex: bad += sum(report(j[0], r) for j, r in zip(some, ex.map(lambda j: run(*j[1:]), some)))
    print(f'{len(jobs)-bad} passed, {bad} failed'); sys.exit(bad > 0)

if __name__ == '__main__': main(*sys.argv[1:2])
