//! What every device must do, tried on each kind that there is: the CPU device, a GPU of
//! the fake driver, and, where there is one, a real GPU. The fake is worth what this
//! suite shows of it on a real driver.
//!
//! The cases on a real GPU are ignored unless they are asked for:
//! `device_contract --include-ignored cuda::`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod copies;
mod memory;
mod pinning;
mod setting;
mod streams;

/// The cases of one kind of device that every machine has.
macro_rules! on {
    ($kind:ident, $($room:ident :: $case:ident),* $(,)?) => {
        mod $kind {
            $(
                #[test]
                fn $case() {
                    super::$room::$case(&super::setting::$kind());
                }
            )*
        }
    };
}

/// Cases for all devices, and those for GPUs alone.
macro_rules! cases {
    (all: $($all:ident :: $all_case:ident),*; gpu: $($gpu:ident :: $gpu_case:ident),* $(;)?) => {
        on!(cpu, $($all::$all_case),*);
        on!(fake, $($all::$all_case),*, $($gpu::$gpu_case),*);
        cuda!($($all::$all_case),*, $($gpu::$gpu_case),*);
    };
}

/// The cases of a real GPU.
macro_rules! cuda {
    ($($room:ident :: $case:ident),*) => {
        mod cuda {
            $(
                #[test]
                #[ignore = "needs a GPU"]
                fn $case() {
                    super::$room::$case(&super::setting::cuda());
                }
            )*
        }
    };
}

cases! {
    all:
        memory::memory_is_counted_until_it_is_dropped,
        memory::more_than_there_is_is_refused_with_figures,
        memory::a_label_stands_at_the_begin,
        memory::a_copy_outside_its_memory_or_over_its_label_is_refused,
        copies::bytes_of_any_size_and_offset_arrive_whole,
        copies::a_publication_comes_after_its_bytes,
        copies::neighbours_go_in_one_copy_and_are_published_in_order,
        copies::copies_arrive_in_the_order_of_their_tickets,
        copies::poison_is_written_in_the_order_of_the_copies,
        copies::what_is_queued_is_counted_until_it_has_arrived;
    gpu:
        memory::memory_imported_twice_reads_the_same,
        memory::what_was_let_go_stays_while_an_import_maps_it,
        pinning::a_segment_is_pinned_in_chunks_and_copied_across_them,
        pinning::pinning_and_unpinning_two_hundred_times_leaves_nothing,
        pinning::pinning_can_be_given_up_between_chunks,
        pinning::a_range_is_not_pinned_twice,
        pinning::unpinned_memory_is_copied_all_the_same,
        streams::a_stream_waits_for_a_part_marks_it_and_gives_it_back,
        streams::a_publication_from_the_host_satisfies_a_wait_for_its_low_half,
        streams::an_event_holds_up_what_it_stood_for_when_it_was_asked,
        streams::many_parts_are_taken_in_batches,
        streams::a_part_that_the_page_has_not_is_refused;
}
