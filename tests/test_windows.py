"One optimizer window, computed in every way there is, has one gradient: micro-batches, packing, shared prompts, recomputation, ranks; dense and with experts."
import itertools, sys
from dataclasses import replace
import cloudpickle, pytest, torch
from molt_nb import corrections
from molt_nb.estimators import Rollouts, Rows
from molt_nb.losses import Objective
from molt_nb.models import random_tiny
from molt_nb.policy import Policy, PolicyConfig, on_ranks

WAYS = [dict(packing=p, share_prompts=s, micro_batch_tokens=b) for p, s, b in itertools.product(('mask', 'none'), (True, False), (4096, 160, 80, 40))]

def a_batch(N=16, L=24):
    "Four groups of four rows with a common prompt; a row of two turns among them."
    g = torch.Generator().manual_seed(0); length, at = torch.randint(10, L + 1, (N,), generator=g), torch.arange(L)
    valid = at < length[:, None]; mask = valid & (at >= 6); mask[5, 8:10] = False
    tokens = torch.randint(3, 299, (N, L), generator=g)*valid; tokens[:, :6] = tokens[torch.arange(N)//4*4, :6]
    rows = Rows(tokens=tokens, valid=valid, mask=mask, logprobs=torch.zeros(N, L), versions=torch.where(mask, 0, -1).int(), rollout=torch.arange(N))
    return Rollouts(torch.rand(N, generator=g), torch.arange(N)//4, [False]*N, length), rows, torch.randn(N, 1, generator=g)*mask

def gradients(rank, world, address, path, ways, experts):
    "[(way, micro-batches, gradient)] on this rank."
    out, (rollouts, rows, advantages) = [], a_batch()
    for recompute in (False, True):
        p = Policy(path, PolicyConfig(ranks=world, expert_parallel=2 if experts and world == 2 else 1, activation_recompute=recompute), 0.7, rank=rank, world=world, address=address); p.build()
        for way in ways:
            for k, v in way.items(): setattr(p.config, k, v)
            grad = p.gradients(rollouts, rows, Objective(correction=corrections.none), advantages)
            out.append((dict(way, recompute=recompute), len(p._plan(rows)[0]), {n.replace('_checkpoint_wrapped_module.', ''): g for n, g in grad.items()}))
    return out

def norms(rank, world, address, path, ways, experts):
    "The gradient's norm of one window: in two parts; the same, with a row scored before the step; and whole, after a part that was given up."
    (rollouts, rows, advantages), o = a_batch(), Objective(correction=corrections.none)
    p = Policy(path, PolicyConfig(ranks=world, expert_parallel=2 if experts else 1, lr=1e-12), 0.7, rank=rank, world=world, address=address); p.build(); found, old = [], torch.zeros(rows.tokens.shape)
    def add(k, part): old[part] = p.add_part(rollouts, rows[part], o, advantages[part], first=not k)
    for scored in (False, True):
        for k, part in enumerate((torch.arange(8), torch.arange(8, 16))): add(k, part)
        if scored: p.score([1, 2, 3])
        found.append(p.finish(replace(rows, old_logprobs=old), o)['policy/grad_norm'])
    add(0, torch.arange(8)); return found + [p.train(rollouts, rows, o, advantages=advantages)['policy/grad_norm']]

def in_children(path, world, ways, experts, work=gradients):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return on_ranks(lambda *rank: work(*rank, path, ways, experts), world)

def off(a, b):
    flat = lambda named: torch.cat([v.flatten().double() for _, v in sorted(named.items())])
    return float((flat(a) - flat(b)).norm()/flat(b).norm())

@pytest.mark.parametrize('experts', [False, True], ids=['dense', 'experts'])
def test_one_gradient(tmp_path, experts):
    path = random_tiny(tmp_path/'model', seed=0, experts=experts)
    [one], two = in_children(path, 1, WAYS, experts), in_children(path, 2, WAYS[::3], experts)
    want = next(g for way, n, g in one if way == dict(packing='none', share_prompts=False, micro_batch_tokens=4096, recompute=False))
    gaps = {(world, n, *way.values()): off(g, want) for world, found in ((1, one), (2, two[0]), (2, two[1])) for way, n, g in found}
    for k in sorted(gaps, key=str): print(k, f'{gaps[k]:.1e}')
    assert {n for _, n, g in one} >= {1, 2} and max(n for _, n, g in one) >= 8      # the windows were cut
    assert max(gaps.values()) < 1e-6, max(gaps.items(), key=lambda x: x[1])

@pytest.mark.parametrize('experts', [False, True], ids=['dense', 'experts'])
def test_between_the_parts_of_a_window(tmp_path, experts):
    "On two ranks: a forward between the last part and the step changes nothing, and neither does a part that no step followed."
    for a, b, c in in_children(random_tiny(tmp_path/'model', seed=0, experts=experts), 2, None, experts, norms): assert a > 0 and b == pytest.approx(a, rel=1e-6) and c == pytest.approx(a, rel=1e-5)
