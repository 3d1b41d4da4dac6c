"""Start a command under a mark of its own, and find every process that still carries the mark: raylets, actors and engine cores inherit it."""
import os, signal, subprocess, sys, tempfile, time, uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

def marked(mark):
    "Processes (pid -> command) with the mark in their environment; zombies do not count."
    found = {}
    for p in Path('/proc').glob('[0-9]*'):
        try:
            if mark.encode() in (p/'environ').read_bytes() and (p/'stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z': found[int(p.name)] = (p/'cmdline').read_bytes().replace(b'\0', b' ').decode()[:150]
        except (OSError, IndexError): pass
    return found

class Marked:
    "A command in a session of its own. `out()` is what it printed so far."
    def __init__(self, cmd, cwd=ROOT, **env):
        self.mark, self.log = f'MOLT_TEST_{uuid.uuid4().hex}', tempfile.NamedTemporaryFile('w+b')
        self.p = subprocess.Popen(cmd, cwd=cwd, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
                                  env={**os.environ, self.mark: '1', 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'agg', 'PYTHONUNBUFFERED': '1', **env})

    def out(self): return Path(self.log.name).read_text(errors='replace')

    def wait_for(self, text, seconds):
        "Wait until the command has printed `text`."
        end = time.time()+seconds
        while text not in self.out():
            if self.p.poll() is not None or time.time() > end: raise AssertionError(f'{text!r} did not come; exit code {self.p.poll()}:\n{self.out()[-3000:]}')
            time.sleep(.2)

    def left(self, seconds=15):
        "What still runs after at most `seconds`."
        end = time.time()+seconds
        while (m := marked(self.mark)) and time.time() < end: time.sleep(.3)
        return m

    def __enter__(self): return self
    def __exit__(self, *_):
        for pid in marked(self.mark):
            try: os.kill(pid, signal.SIGKILL)
            except ProcessLookupError: pass
        self.p.wait()

def python(code, **kw): return Marked([sys.executable, '-c', code], **kw)
