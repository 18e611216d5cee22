"""Where each kind of fault that people met in public projects is tested.

Paths are below `tests/`. A file alone means the tests in it whose names hold the number of the kind.

 1 the input is written between two projections: adversarial/test_field_reports_writes.py,
   fusions/test_prover.py::test_refused_with_the_reason_and_the_line
 2 the write goes through another name: adversarial/test_field_reports_writes.py
 3 setitem, +=, inplace=True: adversarial/test_field_reports_writes.py
 4 a submodule or an operator writes its input: adversarial/test_field_reports_writes.py
 5 deciding on a trace that stopped: adversarial/test_field_reports_writes.py
 6 weights loaded after fusing: adversarial/test_field_reports_in_use.py,
   models/test_models.py::test_unfused_checkpoint_loaded_into_a_fused_model
 7 nothing is fused and nobody says so: adversarial/test_field_reports_parts.py,
   model/test_apply.py::test_strict_refuses_what_is_not_whole_and_changes_nothing
 8 results kept for a class whose instances differ: adversarial/test_field_reports_parts.py,
   adversarial/test_forwards.py::test_two_instances_of_one_class_that_differ_are_decided_apart
 9 hooks and parametrizations: adversarial/test_field_reports_parts.py,
   model/test_layout.py::test_global_hooks_see_every_part,
   model/test_apply.py::test_hooks_on_the_rewritten_module_keep_firing
10 adapters that look like a linear: adversarial/test_field_reports_parts.py
11 decorated forwards: adversarial/test_field_reports_forwards.py,
   forward/test_compile.py::test_wrappers_three_deep_are_each_kept_and_the_original_untouched
12 closures, super(), private names: adversarial/test_field_reports_forwards.py,
   forward/test_compile.py::test_nonlocal_writes_reach_the_original_cell
13 source that is missing, stale or cut: adversarial/test_field_reports_forwards.py,
   forward/test_source.py::test_notebook_cell_has_source
14 copies and pickles: adversarial/test_field_reports_in_use.py,
   model/test_layout.py::test_saved_model_opens_where_fusekit_is_not_installed
15 projections of different tensors: adversarial/test_field_reports_forwards.py
16 one linear called twice, or elsewhere: adversarial/test_field_reports_forwards.py,
   adversarial/test_field_reports_in_use.py, fusions/test_merge.py::test_tied_modules_and_parameters_say_where
17 mixed precision in one group: adversarial/test_field_reports_parts.py,
   model/test_bad_input.py::test_quantised_part_is_named
18 a bias on some: adversarial/test_field_reports_parts.py,
   fusions/test_merge.py::test_missing_bias_is_no_parameter_and_gets_no_gradient
19 norms of 1 + weight: adversarial/test_field_reports_norms.py
20 where a norm casts back: adversarial/test_field_reports_norms.py,
   fusions/test_rms_norm.py::test_any_order_of_casts_is_fused_in_its_own_bits_or_refused
21 another spelling of the call: adversarial/test_field_reports_forwards.py,
   fusions/test_reached.py::test_linears_called_in_another_way_are_refused_with_the_line
22 guards, arms, stores into containers: adversarial/test_field_reports_forwards.py
23 branches that a trace did not see: adversarial/test_field_reports_forwards.py,
   fusions/test_prover.py::test_arms_that_leave_the_input_alone
24 other spellings of one function: fusions/test_rms_norm.py::test_spelling_fuses_with_the_same_bits,
   fusions/test_rms_norm.py::test_near_norm_is_refused_and_says_which_kind; in graphs: the pattern matcher
25 decompositions, ranks, dtypes of patterns: the pattern matcher
26 replacements of several outputs: the pattern matcher
27 literals as wildcards: the pattern matcher; of modules
   fusions/test_rms_norm.py::test_eps_is_read_from_the_instance
28 norms that drift over depth: adversarial/test_field_reports_norms.py
29 eps from the wrong place: adversarial/test_field_reports_norms.py,
   fusions/test_rms_norm.py::test_computing_eps_for_one_norm_changes_nothing_for_another
30 results written in place: adversarial/test_field_reports_parts.py,
   model/test_training.py::test_outputs_may_be_written_in_place
31 ranks and contiguity: adversarial/test_field_reports_parts.py,
   adversarial/test_forwards.py::test_every_kind_of_input,
   fusions/test_trial.py::test_a_view_that_another_rank_joins_is_right_at_every_rank
32 subclasses that compute more: adversarial/test_field_reports_parts.py
33 adapters put in afterwards: adversarial/test_field_reports_parts.py,
   model/test_layout.py::test_adapters_put_in_afterwards_are_used_in_the_order_of_the_forward
34 attributes that a wrapper lacks: adversarial/test_field_reports_in_use.py
35 keys of the state dict: adversarial/test_field_reports_in_use.py,
   models/test_models.py::test_saved_fused_and_loaded_unfused
36 values after reverting: adversarial/test_field_reports_in_use.py,
   model/test_apply.py::test_present_values_stay
37 what reverting leaves behind: model/test_apply.py::test_revert_gives_back_what_was_there
38 patches that reach other models: adversarial/test_field_reports_in_use.py,
   model/test_apply.py::test_another_model_of_the_class_is_left_alone
39 a forward that stands on the instance: adversarial/test_field_reports_in_use.py
40 two patchers of one forward: adversarial/test_field_reports_in_use.py,
   model/test_apply.py::test_class_swapped_by_another_tool_afterwards_is_not_destroyed
41 compiling: model/test_compile.py::test_twelve_equal_layers_are_one_graph,
   model/test_compile.py::test_compiled_before_it_was_fused
42 the namespace of what is compiled: forward/test_compile.py::test_patched_global_is_seen,
   forward/test_compile.py::test_names_do_not_leak, adversarial/test_forwards.py::GlobalNamedLikeAPart
43 splats, len, stores, keywords: adversarial/test_field_reports_in_use.py
44 patterns of operators that write: the pattern matcher
45 reshape and view in patterns: the pattern matcher
46 inner values that others use: the pattern matcher; of modules
   fusions/test_glu.py::test_activated_gate_that_others_see_is_never_taken_from_them
47 a cell that is run twice: the pattern matcher; of own fusions
   fusions/test_own.py::test_registering_a_name_again_replaces_it
48 fused and not faster: timing, which no test measures
49 optimizers and averages: adversarial/test_field_reports_in_use.py,
   model/test_training.py::test_optimizer_takes_the_same_three_steps
50 tied parameters: adversarial/test_field_reports_in_use.py,
   models/test_smollm2.py::test_tied_embeddings_stay_tied_while_fused
51 weights that are sharded, offloaded or on meta: adversarial/test_field_reports_in_use.py
52 subclasses of tensors: adversarial/test_field_reports_parts.py
53 dtype or device of the first part: model/test_bad_input.py::test_dtypes_of_the_parts_are_named,
   model/test_bad_input.py::test_parts_on_several_devices_are_named_with_their_devices
54 unequal widths: adversarial/test_field_reports_parts.py
55 packed and interleaved rows: adversarial/test_field_reports_norms.py,
   fusions/test_gated.py::test_what_only_looks_like_a_gated_product_says_why
56 gated norms: adversarial/test_field_reports_norms.py,
   fusions/test_gated_rms_norm.py::test_any_gate_is_fused_in_its_own_bits_or_refused
57 norms over part of the features: adversarial/test_field_reports_norms.py
58 other kernels, other bits: models/test_smollm2.py::test_fused_it_gives_the_same_answers_token_for_token,
   model/test_verify.py::test_a_fork_that_float64_tells_apart_fails; on a GPU, benchmarks/gpu.py
59 routers: adversarial/test_field_reports_norms.py,
   model/test_choices.py::test_picks_that_float64_tells_apart_fail
60 autocast and mixed dtypes: adversarial/test_field_reports_norms.py,
   model/test_training.py::test_autocast
61 training and checkpointing: adversarial/test_field_reports_in_use.py,
   fusions/test_own.py::test_what_does_something_else_in_training_cannot_be_replaced
62 tools that look for names: adversarial/test_field_reports_in_use.py
63 weights held twice: adversarial/test_field_reports_in_use.py,
   model/test_apply.py::test_peak_memory_of_apply_and_revert_is_one_site_more_than_the_model
64 operands that nobody filled: adversarial/test_field_reports_parts.py
65 new code on an instance that lacks attributes: adversarial/test_field_reports_in_use.py
66 limits of fx.subgraph_rewriter: the pattern matcher
67 the compiler fuses the same linears: model/test_compile.py::test_inductor
68 pictures that do not show what is fused: display/test_graph.py, display/test_groups.py
69 widgets that vanish: display/test_display.py, notebooks/test_notebooks.py
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KINDS = dict(re.findall(r"^ ?(\d+) (.*?)(?=\n ?\d+ |\Z)", __doc__, flags=re.S | re.M))
ELSEWHERE = {24, 25, 26, 27, 44, 45, 46, 47, 48, 66, 68, 69}  # the matcher of patterns, timing, displays


def test_every_kind_is_listed():
    assert [int(number) for number in KINDS] == list(range(1, 70))


@pytest.mark.parametrize("number", [int(number) for number in KINDS])
def test_what_is_listed_is_there(number):
    named = re.findall(r"([\w/]+\.py)(?:::(\w+))?", KINDS[str(number)])
    named = [(path, name) for path, name in named if not path.startswith("benchmarks/")]
    assert named or number in ELSEWHERE
    for path, name in named:
        text = (TESTS / path).read_text()
        if name:
            assert name in text, (path, name)
        elif "field_reports" in path:
            assert re.search(rf"Kind{number:02}|def test_(\d\d_)?{number:02}_", text), path
