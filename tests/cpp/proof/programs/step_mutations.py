"""Break a rule of the elastic step or of BalancedSampler's dealing; a named Python test must fail.

    S2   a step is committed once all members have all of its sums; errors of the program are raised
    S4   a step's result is the sum over its members, divided by their weights
    S5   gradients are the local ones until the step is committed
    S6   a step that is summed again begins with the state of the one before
    S8   buffers after a commit are those of the leader, and part of the step
    D1   an index is trained once per epoch
    D2   what was dealt to a rank that is gone is dealt again
    D3   all members have the same number of batches
    D4   a deal depends on seed, epoch and the steps on record alone

The agreement's own rules are in agreement_mutations.py, driver_mutations.py and
joining_mutations.py. See mutated_package.py for what is expected of each.

    python tests/cpp/proof/programs/step_mutations.py --check
    python tests/cpp/proof/programs/step_mutations.py [--work FOLDER] [--only NAME …]

`--only D` needs no build.
"""

from __future__ import annotations

import sys

import mutated_package
from mutated_package import Mutation

_ELASTIC = "tests/python/elastic"
_DDP = "tests/python/ddp"
_REDONE = f"{_ELASTIC}/test_redone_steps.py::test_a_step_that_is_summed_again_has_the_same_bits[3]"
_KILLED = f"{_ELASTIC}/test_killed_trainings.py::test_a_rank_dies_at_a_known_place"
_MEANS = f"{_ELASTIC}/test_elastic_mean.py::test_means"
_JOINS = f"{_ELASTIC}/test_balanced_joins.py::test_a_process_joins_and_gets_a_share"
_AGAIN = f"{_DDP}/test_sampler_deaths.py::test_what_a_dead_rank_was_dealt_is_dealt_again"
_LATE = f"{_DDP}/test_sampler_deaths.py::test_what_comes_back_too_late_comes_in_the_next_epoch"
_RESUMED = (
    f"{_DDP}/test_sampler_deaths.py::"
    "test_a_job_that_is_resumed_deals_it_at_once_or_in_the_next_epoch"
)
_WALKS = f"{_DDP}/test_sampler_joins.py::test_random_joins_and_deaths"
_SHARE = f"{_DDP}/test_sampler_joins.py::test_a_rank_that_joins_has_a_share_lookahead_batches_later"
_ORDER = f"{_DDP}/test_balanced_sampler.py::test_the_order_follows_from_seed_and_epoch_alone"
_TOO_FAR = (
    f"{_DDP}/test_balanced_sampler.py::"
    "test_a_loader_that_runs_ahead_too_far_gets_an_error_and_no_shares"
)
_LOOKAHEAD = f"{_DDP}/test_share_plan.py::test_a_step_decides_no_batch_before_its_lookahead"

MUTATIONS = [
    # ---- the step, in Python
    Mutation(
        "S5: gradients are views of buckets",
        "wrapper.py",
        "            gradient_as_bucket_view = elastic is None\n",
        "            gradient_as_bucket_view = True\n",
        _REDONE,
    ),
    Mutation(
        "S8: buffers are no part of the step",
        "between_steps.py",
        "            self.reducer.set_buffers(self.modules_buffers)\n",
        "            self.reducer.set_buffers([])\n",
        _REDONE,
    ),
    Mutation(
        "S8: buffers travel in the forward pass",
        "between_steps.py",
        "            return  # they are part of the step\n",
        "            pass\n",
        f"{_KILLED}[0-forward]",
    ),
    Mutation(
        "S4: in a mean all members count alike",
        "elastic.py",
        "counts = self._last_samples() if weight is None",
        "counts = 1.0 if weight is None",
        _MEANS,
    ),
    Mutation(
        "S4: what does not count is part of a mean",
        "elastic.py",
        "        if counts:  # else it may be NaN\n",
        "        if True:\n",
        _MEANS,
    ),
    Mutation(
        "S4: a batch that is not this process's share counts",
        "weights.py",
        "        if not self._has_share():\n            self.reducer.set_weight(0.0)\n",
        "        if False:\n            self.reducer.set_weight(0.0)\n",
        f"{_JOINS}[most]",
    ),
    Mutation(
        "S4: a batch that is not this process's share counts if the program says so",
        "weights.py",
        "checked if self._has_share() else 0.0",
        "checked",
        f"{_JOINS}[says]",
    ),
    # ---- the deal
    Mutation(
        "D1: what a rank trained in its last step is dealt again",
        "share_plan.py",
        "Departure(gone, self._trained, until)",
        "Departure(gone, max(0, self._trained - record.batches), until)",
        _AGAIN,
    ),
    Mutation(
        "D1: what an epoch has taken over is dealt in the one behind it, too",
        "deal.py",
        "        self._put(batch, Rest(back))\n        self._carried = ()\n",
        "        self._put(batch, Rest(back))\n",
        f"{_RESUMED}[2]",
    ),
    Mutation(
        "D1: a rank that has joined trains others' samples",
        "balanced_sampler.py",
        "        self._waits = self._rank not in members\n",
        "        self._waits = False\n",
        _SHARE,
    ),
    Mutation(
        "D2: what the dead were dealt is lost",
        "deal.py",
        "            if each.until == batch:\n",
        "            if False:\n",
        _AGAIN,
    ),
    Mutation(
        "D2: only what the dead had of one batch is dealt again",
        "deal.py",
        "for batch in range(departure.since, until)",
        "for batch in range(until - 1, until)",
        _AGAIN,
    ),
    Mutation(
        "D2: what comes back behind an epoch's last batch is lost",
        "deal.py",
        "        self._put(batch, Rest(back))\n",
        "        self._put(batch, Rest())\n",
        _LATE,
    ),
    Mutation(
        "D2: what is to come back is not saved",
        "deal.py",
        "            *self._to_return(batch, departures),\n        ]\n",
        "        ]\n",
        f"{_RESUMED}[1]",
    ),
    Mutation(
        "D2: batches are forgotten before what the dead had of them comes back",
        "balanced_sampler.py",
        "self._deals.forget(min([plan.timed, *(each.since for each in plan.departures)]))",
        "self._deals.forget(plan.timed)",
        _WALKS,
    ),
    Mutation(
        "D3: a rank without a share has no batch",
        "balanced_sampler.py",
        "            yield dealt.part(self._rank) or dealt.indices(0, self._first_limits.fewest)\n",
        "            if not (part := dealt.part(self._rank)):\n                return\n"
        "            yield part\n",
        _SHARE,
    ),
    Mutation(
        "D3: an epoch with a death has no more batches than another",
        "balanced_sampler.py",
        "        return not self._deals.has(now, self._plan.decided(now), self._plan.departures)\n",
        "        return now - self._begin >= len(self)\n",
        _WALKS,
    ),
    Mutation(
        "D4: epoch 1 of a seed is epoch 0 of the next one",
        "deal.py",
        'manual_seed(int.from_bytes(hashed, "little") >> 1)',
        "manual_seed(seed + epoch)",
        _ORDER,
    ),
    Mutation(
        "D4: each process draws an order of its own",
        "deal.py",
        "torch.randperm(length, generator=generator)",
        "torch.randperm(length)",
        _ORDER,
    ),
    Mutation(
        "D4: a death changes what loaders may have dealt",
        "share_plan.py",
        "        until = self._trained + record.batches - 1 + self._lookahead\n",
        "        until = self._trained + record.batches\n",
        _WALKS,
    ),
    Mutation(
        "D4: times change what loaders may have dealt",
        "share_plan.py",
        "self._decide(self._timed - 1 + self._lookahead)",
        "self._decide(self._timed)",
        _LOOKAHEAD,
    ),
    Mutation(
        "D4: a loader that runs ahead deals the shares that it knows",
        "share_plan.py",
        "        if batch - self._lookahead >= self._timed:\n",
        "        if False:\n",
        _TOO_FAR,
    ),
    # ---- the step, in the extension, which takes minutes to build: no more than six
    Mutation(
        "S2: an error of the program beside a death is none",
        "elastic_steps.cc",
        "!(driver_->isOver(present_) && isOfMembers(error))",
        "!driver_->isOver(present_)",
        f"{_ELASTIC}/test_step_ends.py::test_a_death_hides_no_exception_of_the_program",
    ),
    Mutation(
        "S4: the sums of those who live are divided by all who were there",
        "reducer.cc",
        "options_.drops_nonfinite_steps);\n  pipeline_->begin(group_.size());\n",
        "options_.drops_nonfinite_steps);\n"
        "  pipeline_->begin(group_.size() + static_cast<int>(stats_.lost_ranks));\n",
        f"{_KILLED}[0-backward]",
    ),
    Mutation(
        "S5: averages are written before the step is committed",
        "reducer_elastic.cc",
        "    pipeline_->awaitAll();\n",
        "    pipeline_->finishAll([this](size_t param) { return isUsed(param); });\n",
        _REDONE,
    ),
    Mutation(
        "S6: what only the dead have used is used",
        "reducer_elastic.cc",
        "  state_.change([](SharedValues& values) { values.knows_used = false; });\n",
        "",
        f"{_ELASTIC}/test_steps_of_a_death.py::"
        "test_a_static_graph_forgets_what_only_the_dead_have_used",
    ),
    Mutation(
        "S6: a step is summed again in the buckets that failed",
        "reducer_elastic.cc",
        "  makeBuckets();\n  show();\n",
        "  pipeline_->begin(group_.size());\n  show();\n",
        _REDONE,
    ),
    Mutation(
        "S8: nobody takes the leader's buffers",
        "leader_state.cc",
        "    buffer.variable_data().copy_(imageOf(buffer, in));\n",
        "",
        _REDONE,
    ),
]


if __name__ == "__main__":
    sys.exit(mutated_package.main(__doc__ or "", MUTATIONS))
