"""What does not run on an accelerator, and why, in one place."""

Reasons = dict[str, list[str]]

#: A reason, and the tests that it goes for: beginnings of their names, as pytest prints them.
ON_ANY: Reasons = {
    "torch refuses dropout by one kernel where a map with one randomness is in another": [
        "tests/generators/test_random_preserve.py::test_a_map_of_a_map[different-same",
    ],
    "it states what happens where a value is on the CPU already": [
        "tests/storage/test_offload.py::test_a_device_where_the_value_is_already_warns",
        "tests/storage/test_conformance.py::"
        "test_a_value_that_its_storage_leaves_alone_is_saved_as_itself",
        "tests/storage/test_held.py::test_what_waits_elsewhere_is_told_apart",
        "tests/interop/test_torch_selective.py::"
        "test_an_offloaded_output_waits_elsewhere",
        "tests/laws/test_law_05_options.py::"
        "test_a_policy_that_offloads_to_where_values_are_says_so",
        "tests/laws/test_law_05_options.py::test_an_inputs_storage_without_effect_says_so",
        "tests/laws/test_law_05_options.py::test_a_warning_is_at_the_users_line[stored]",
        "tests/reporting/test_waiting.py::"
        "test_what_waits_elsewhere_does_not_make_the_peak",
    ],
    "it counts the workspace of draws on a CPU; an accelerator's tiles are larger": [
        "tests/random/test_memory.py",
    ],
    "it measures a CPU, or prints what a CPU computes": [
        *(
            f"tests/benchmarks/test_benchmarks.py::{name}"
            for name in (
                "test_jax_takes_its_steps_in_a_process_of_its_own",
                "test_jax_is_handed_all_that_a_step_reads",
                "test_a_model_of_transformers_is_measured_beside_its_own_checkpointing",
                "test_eight_models_of_transformers_are_built",
            )
        ),
        *(
            f"tests/test_examples.py::test_docstring_examples[remat.{module}]"
            for module in (
                *("_switches.blocks", "layers._cross_entropy", "layers._tiled"),
                *("random._draws", "random._keys", "reporting._named_values"),
                "storage._stored",
            )
        ),
        "tests/test_examples.py::test_program[hessian]",
    ],
    "operators warn there already, where they are not deterministic": [
        "tests/laws/test_law_12_numerics_switches.py::"
        "test_recomputed_operators_see_the_forwards_switches[warn_only-",
    ],
    "torch calls fused recurrent cells there, which tensors without data do not run": [
        "tests/tracing/test_in_place.py::test_gates_of_a_recurrent_cell",
    ],
    "numpy sees memory of the CPU alone": [
        "tests/laws/test_law_06_or_an_error.py::"
        "test_a_tensor_that_cannot_be_followed_is_an_error[numpy_property]",
        *(
            "tests/laws/test_law_06_or_an_error.py::"
            f"test_a_stage_that_cannot_be_followed_is_an_error[{schedule}-numpy_property]"
            for schedule in ("None", "schedule1", "schedule2")
        ),
        "tests/laws/test_law_06_or_an_error.py::"
        "test_an_array_that_changes_is_noticed_or_an_error",
        "tests/rerun/test_rerun.py::test_gradients_are_bitwise_plains[opaque-",
        "tests/rerun/test_auto.py::"
        "test_what_cannot_be_traced_runs_again_and_warns_once[opaque]",
        "tests/partition/test_opaque.py::test_a_kernel_without_an_operator",
    ],
    "a thread that it starts makes its tensors on the CPU: a default device is a thread's own": [
        "tests/laws/test_law_11_restores.py::test_two_threads_train_through_one_region",
        "tests/laws/test_law_11_restores.py::test_threads_derive_from_one_region_at_once",
        "tests/switches/test_first_order.py::test_another_thread_has_all_orders",
        "tests/rerun/test_nested.py::test_functions_that_run_again_on_two_threads",
    ],
    "torch's interpreter runs programs of small tensors on a CPU alone": [
        "tests/programs/test_interpreted.py::"
        "test_a_long_program_of_small_tensors_gains[long]",
        "tests/programs/test_interpreted.py::test_a_transformer_block_is_run_there",
        "tests/programs/test_interpreted.py::"
        "test_the_switch_of_the_interpreter_is_put_back",
        "tests/programs/test_interpreted.py::test_threads_share_an_interpreted_program",
        "tests/programs/test_interpreted.py::"
        "test_a_thread_that_fails_leaves_the_others_alone",
    ],
    "a module's conversion to the CPU is one there": [
        "tests/tracing/test_conversions.py::test_a_conversion_to_what_a_module_is[cpu-",
    ],
    "of float64 numbers, attention is composed of operators that have a forward mode": [
        "tests/testing/test_assert_equivalent.py::"
        "test_what_the_first_function_does_not_support_is_excused",
    ],
    "plain torch raises there: a write to a view has no second derivative on its kind of device": [
        "tests/laws/test_law_01_higher_order.py::test_second_derivatives[in_place_on_views]",
        *(
            "tests/laws/test_law_01_every_order.py::"
            f"test_gradients_that_plain_autograd_records[{way}-in_place"
            for way in ("in grad", "in grad(grad)", "in vmap(grad)", "by a leaf")
        ),
    ],
    "torch.compile takes the default device from what is traced apart, as its own checkpoint": [
        *(
            f"tests/tracing/test_operators_of_functions.py::{name}"
            for name in (
                "test_values_and_gradients_are_those_of_plain_torch[constants]",
                "test_what_is_refused_names_the_line[returns an operand]",
                "test_what_is_refused_names_the_line[writes to an operand]",
                "test_what_is_refused_names_the_line[carries a number]",
            )
        ),
        "tests/calls/test_compiled_calls.py::test_each_size_has_its_numbers",
        "tests/calls/test_compiled_calls.py::test_a_mark_on_what_no_region_reads_stays",
        "tests/calls/test_compiled_calls.py::test_a_policy_sees_the_lines_of_the_user",
        *(
            f"tests/calls/test_under_compile.py::test_draws_in_a_graph_are_those_outside[{end}]"
            for end in ("a function", "nested, grad", "vmap(grad)")
        ),
    ],
    "autograd has a thread for the device, on which the variable is still unset": [
        "tests/laws/test_law_07_no_stale_state.py::"
        "test_a_context_variable_that_was_unset_cannot_be_again",
    ],
    "of values of such sizes torch composes attention, or lays it out for another kernel": [
        "tests/laws/test_law_02_names_and_policies.py::"
        "test_names_cover_the_helpers_of_attention",
        *(
            "tests/laws/test_law_02_names_and_policies.py::"
            f"test_of_multi_head_attention_the_output_alone_is_saved[{mask}-0.0]"
            for mask in ("None", "mask1")
        ),
        "tests/partition/test_opaque.py::test_attention_is_one_value[nothing]",
        *(
            "tests/reporting/test_suggestions.py::"
            f"test_an_output_that_lives_anyway_costs_nothing[{end}-named_attention]"
            for end in ("dropped", "held outside", "returned")
        ),
    ],
}
ON_THE_STAND_IN: Reasons = {
    "it starts processes of its own, which have no such device": [
        "tests/storage/test_shard.py",
    ],
    "torch composes attention of other operators on a device without kernels for it": [
        "tests/laws/test_law_02_names_and_policies.py::test_matmul_policy_on_attention",
        "tests/interop/test_transformers.py::"
        "test_of_attention_the_output_alone_is_saved[llama_fused]",
        "tests/reporting/test_checklist.py::test_a_good_model_passes",
        "tests/reporting/test_checklist.py::"
        "test_each_row_can_fail[attention not run twice]",
        "tests/reporting/test_checklist.py::test_without_regions_most_does_not_apply",
        "tests/reporting/test_report.py::test_the_largest_values",
    ],
    "torch calls fused recurrent cells on any device of its kind, and the CPU has none": [
        "tests/layers/test_scan.py::test_a_module_is_a_step",
        "tests/modules/test_training.py::"
        "test_recurrent_modules_with_other_parameters[GRU]",
        "tests/laws/test_law_01_modules.py::"
        "test_a_module_trains_alike[a_kernel_that_asks_for_grad_mode]",
    ],
    "its batch_norm is the CPU's, whose shapes and strides are expected on a CPU alone": [
        "tests/modules/test_modules.py::test_under_torch_func",
        "tests/laws/test_law_01_modules.py::"
        "test_a_batch_norm_of_channels_that_come_last",
        "tests/tracing/test_strides.py::test_a_norm_of_groups",
    ],
    "traces call batch_norm on other devices than a CPU by another name, and as often": [
        "tests/laws/test_law_14_operators.py::"
        "test_no_more_of_a_kind_than_plain_torch[batch_norm grad(grad)]",
    ],
    "Inductor does not know the device": [
        "tests/programs/test_backend.py",
    ],
    "no backend of collectives knows the device": [
        "tests/partition/test_opaque.py::"
        "test_collectives_are_saved_by_name_or_operator",
    ],
    "its kernels are the CPU's, behind copies that the allocator counts": [
        "tests/programs/test_reuse.py::test_a_chain_takes_the_memory_of_one_value",
        "tests/programs/test_reuse.py::"
        "test_the_backward_of_an_mlp_holds_one_hidden_state_less",
        "tests/programs/test_reuse.py::test_a_subclass_is_not_written_over",
        "tests/plans/test_workspaces.py",
    ],
    "autograd's thread for the device keeps what it ran last": [
        "tests/tracing/test_operators_of_functions.py::"
        "test_a_second_derivative_is_right_or_refused",
        "tests/tracing/test_operators_of_functions.py::"
        "test_a_graph_of_the_backward_is_refused",
    ],
    "torch's DataParallel hands out tensors by functions of CUDA": [
        "tests/interop/test_torch.py::test_data_parallel",
    ],
    "the device has no sparse tensors": [
        "tests/rerun/test_rerun.py::test_a_sparse_argument",
        "tests/rerun/test_rerun.py::test_what_is_not_strided_under_autocast",
        "tests/tracing/test_values_in_shapes.py::test_a_sparse_result_is_refused",
        "tests/layers/test_runner.py::test_sparse_gradients_are_summed",
        "tests/laws/test_law_10_inert_without_grad.py::"
        "test_a_tensor_that_cannot_be_traced_is_taken_where_nothing_is_differentiated"
        "[to_sparse]",
    ],
}
#: As found on an H200, where what needs transformers did not run last.
ON_A_GPU: Reasons = {
    "an index out of range, or a wrong probability, ends the whole process on a GPU": [
        "tests/random/test_trackers.py::test_an_operator_that_raises_in_a_program",
        "tests/generators/test_random_preserve.py::test_a_draw_that_raises_in_a_program",
        "tests/laws/test_law_11_restores.py::"
        "test_an_exception_half_way_leaves_nothing_changed",
        "tests/laws/test_law_11_restores.py::test_an_exception_under_a_transform",
        "tests/laws/test_law_11_restores.py::"
        "test_an_operators_own_check_is_not_lost[assert",
        "tests/programs/test_interpreted.py::test_an_error_is_the_operators_own",
        "tests/plans/test_workspaces.py::test_what_does_not_run_on_zeros_is_refused",
    ],
    "the allocator and torch's tracker count blocks of 512 bytes, which small values do not fill": [
        "tests/reporting/test_report_figures.py::test_bytes_agree_with_torchs_tracker",
        "tests/reporting/test_report_figures.py::"
        "test_bytes_of_a_plain_function_agree_with_torchs_tracker",
        "tests/reporting/test_report_figures.py::"
        "test_other_models_agree_with_torchs_tracker",
        "tests/reporting/test_out_of_memory.py::test_bytes_are_those_that_were_held",
        *(
            f"tests/benchmarks/test_benchmarks.py::test_a_region_holds_what_the_limit_says[{row}]"
            for row in (
                *("tiny", "middle", "large", "gpt-12", "gpt-24"),
                *("convolutions", "scan"),
            )
        ),
        "tests/plans/test_costs.py::test_a_dtensor_is_measured_as_the_part_of_this_rank",
        "tests/plans/test_workspaces.py::test_the_peak_is_what_the_allocator_gives[strided]",
    ],
    "heads of such sizes are composed of other operators there": [
        "tests/interop/test_transformers.py::"
        f"test_of_attention_the_output_alone_is_saved[{model}]"
        for model in ("gpt2", "llama")
    ],
    "torch was built without the library whose operator it calls": [
        "tests/laws/test_law_01_quiet_writers.py::"
        "test_statistics_are_written_once[aten.miopen",
    ],
    "kernels of long programs are called from C++ on a CPU alone": [
        "tests/programs/test_backend.py::"
        "test_kernels_of_long_programs_are_called_from_cpp[12-True]",
    ],
    "the log-sum-exp of attention is padded there": [
        "tests/reporting/test_report.py::test_parameters_and_gradients_count_apart",
    ],
    "dropout of what a map with one randomness does not map is another kernel in plain torch": [
        "tests/generators/test_random_preserve.py::"
        "test_what_no_example_has_for_itself[same-draws",
    ],
    "a trace refuses cuDNN's recurrent layers, which look where their weights lie": [
        "tests/laws/test_law_01_modules.py::"
        "test_a_module_trains_alike[a_kernel_that_asks_for_grad_mode]",
        "tests/modules/test_training.py::test_recurrent_modules_with_other_parameters",
        "tests/modules/test_training.py::"
        "test_a_region_that_calls_a_recurrent_module_leaves_it_as_it_was",
    ],
}


def reason(name: str, *, is_standin: bool) -> str | None:
    """Why a test does not run, None if it does."""
    for why, names in (ON_ANY | (ON_THE_STAND_IN if is_standin else ON_A_GPU)).items():
        if name.startswith(tuple(names)):
            return f"not on this device: {why}"
    return None
