"""Weight sync with what no single notebook has: two engines, a core killed in the middle of a transfer, a mixture of experts."""
import asyncio, os, signal, sys, time
import pytest

import ray
import torch
from molt_nb.engines import Engine, EngineConfig, Sampling, engine_env
from molt_nb.models import random_tiny
from molt_nb.router import actor, start_ray
from molt_nb.weight_sync import Sender, SyncError, WeightSync, make_manifest

CONFIG = EngineConfig(request_timeout_s=60.0)


class Trainer:
    "Policy rank 0 over transformers; `pause_s` seconds before each weight make a transfer long enough to be hit."
    def __init__(self, path):
        from transformers import AutoModelForCausalLM
        self.model, self.pause_s = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), 0
    def _named(self):
        for n, p in self.model.named_parameters(): time.sleep(self.pause_s); yield n, p
    def manifest(self): return make_manifest(list(self.model.named_parameters()), bucket_bytes=128 << 10)
    def connect(self, host, port, world, timeout_s): self.sender = Sender(host, port, world, timeout_s=timeout_s)
    def send(self): return self.sender.send(self._named(), self.manifest())
    def step(self, seed, pause_s=0):
        self.pause_s, g = pause_s, torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.model.parameters(): p.add_(.02*torch.randn(p.shape, generator=g))
    def logprobs(self, row, start):
        row = torch.tensor([row])
        with torch.no_grad(): return self.model(row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None])[start-1:, 0].tolist()


@pytest.fixture(scope='module')
def cluster():
    start_ray(4)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])      # workers cannot import a test file
    yield
    ray.shutdown()

def engine_actor(path, name):
    return actor(Engine, engine_env(CONFIG), max_concurrency=64).remote(path, CONFIG, Sampling(), name)

def trainer_actor(path): return actor(Trainer, dict(OMP_NUM_THREADS='1')).remote(path)

async def gap(engine, trainer, seed=0):
    "(largest |engine - trainer| over a fresh row, its versions)"
    prompt = [1, 50, 60, 70 + seed]
    turn = await engine.generate.remote(prompt, 60, seed)
    mine = await trainer.logprobs.remote([*prompt, *turn.ids], len(prompt))
    return max(abs(a - b) for a, b in zip(turn.logprobs, mine)), set(turn.versions)


def test_two_engines_and_a_death(cluster, tmp_path):
    path = random_tiny(tmp_path/'tiny')
    async def scene():
        engines, trainer = [engine_actor(path, f'engine{i}') for i in range(2)], trainer_actor(path)
        await asyncio.gather(*[e.start.remote() for e in engines])
        sync = WeightSync([trainer], timeout_s=60); await sync.connect({f'engine{i}': e for i, e in enumerate(engines)})
        await trainer.step.remote(1); await sync.publish(1)
        for e in engines:
            worst, versions = await gap(e, trainer); assert worst < 1e-5 and versions == {1}
        # the core of engine0 is killed while the weights are on their way: nobody hangs, both engines are reported
        await trainer.step.remote(2, .05); pid = (await engines[0].status.remote())['pid']; t = time.time()
        publishing = asyncio.ensure_future(sync.publish(2)); await asyncio.sleep(.4); os.kill(pid, signal.SIGKILL)
        with pytest.raises(SyncError) as e: await publishing
        assert time.time() - t < 40 and 'engine0' in e.value.failed and 'died' in e.value.failed['engine0']
        assert 'engine1' in e.value.failed                                     # its weights are mixed: never resumed
        with pytest.raises(ray.exceptions.RayTaskError): await engines[1].resume.remote()
        # replacements, a new epoch
        for old in engines: ray.kill(old)
        engines = [engine_actor(path, f'engine{i}') for i in range(2)]; await asyncio.gather(*[e.start.remote() for e in engines])
        sync = WeightSync([trainer], timeout_s=60); await sync.connect({f'engine{i}': e for i, e in enumerate(engines)})
        await trainer.step.remote(3); await sync.publish(3, 'drain')
        for e in engines:
            worst, versions = await gap(e, trainer, 1); assert worst < 1e-5 and versions == {3}
        await asyncio.gather(*[e.stop.remote() for e in engines])
    asyncio.run(scene())


def test_mixture_of_experts(cluster, tmp_path):
    path = random_tiny(tmp_path/'moe', experts=True)
    async def scene():
        engine, trainer = engine_actor(path, 'engine0'), trainer_actor(path)
        await engine.start.remote()
        sync = WeightSync([trainer], timeout_s=60); await sync.connect(dict(engine0=engine))
        whole = sync.manifest
        await trainer.step.remote(1)
        sync.manifest = {**whole, 'repair': False}; await sync.publish(1); assert (await gap(engine, trainer))[0] > .05     # vLLM's own end of a reload
        sync.manifest = whole; await sync.publish(2); worst, versions = await gap(engine, trainer, 1); assert worst < 1e-5 and versions == {2}
        await engine.stop.remote()
    asyncio.run(scene())
