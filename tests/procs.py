"""Start a command and find every process that it leaves behind. The test process adopts orphans (PR_SET_CHILD_SUBREAPER), so raylets, actors and
engine cores stay its descendants, whatever they do to their names, sessions and environments."""
import ctypes, os, signal, subprocess, sys, tempfile, time
from pathlib import Path
import psutil

ROOT = Path(__file__).resolve().parent.parent
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

def descendants():
    "Living descendants (pid -> command) of this process; zombies do not count."
    found = {}
    for p in psutil.Process().children(recursive=True):
        try:
            if p.status() != psutil.STATUS_ZOMBIE: found[p.pid] = ' '.join(p.cmdline())[:150]
        except psutil.Error: pass
    return found

class Marked:
    "A command in a session of its own. `out()` is what it printed so far."
    def __init__(self, cmd, cwd=ROOT, **env):
        self.before, self.log = set(descendants()), tempfile.NamedTemporaryFile('w+b')
        self.p = subprocess.Popen(cmd, cwd=cwd, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
                                  preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),      # a shell's background job hands on an ignored Ctrl-C
                                  env={**os.environ, 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'agg', 'PYTHONUNBUFFERED': '1', **env})

    def out(self): return Path(self.log.name).read_text(errors='replace')

    def wait_for(self, text, seconds):
        "Wait until the command has printed `text`."
        end = time.time()+seconds
        while text not in self.out():
            if self.p.poll() is not None or time.time() > end: raise AssertionError(f'{text!r} did not come; exit code {self.p.poll()}:\n{self.out()[-3000:]}')
            time.sleep(.2)

    def left(self, seconds=30):
        "What still runs after at most `seconds`."
        end = time.time()+seconds
        def now(): return {k: v for k, v in descendants().items() if k not in self.before}
        while (m := now()) and time.time() < end: time.sleep(.3)
        return m

    def __enter__(self): return self
    def __exit__(self, *_):
        for pid in self.left(0):
            try: os.kill(pid, signal.SIGKILL)
            except ProcessLookupError: pass
        self.p.wait()

def python(code, **kw): return Marked([sys.executable, '-c', code], **kw)
