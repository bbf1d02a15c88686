//! Numbers of the driver's results (`CUresult`) and their names, up to CUDA 13.4. A table
//! of our own: the driver's text may be missing when it is needed, and a number that the
//! table lacks must still be reported.

/// Done.
pub const SUCCESS: u32 = 0;
/// An argument is out of range.
pub const INVALID_VALUE: u32 = 1;
/// Too little memory, or another resource, for now.
pub const OUT_OF_MEMORY: u32 = 2;
/// The driver was not started in this process: it may be a forked child.
pub const NOT_INITIALIZED: u32 = 3;
/// The process is on its way out.
pub const DEINITIALIZED: u32 = 4;
/// There is a driver but no GPU.
pub const NO_DEVICE: u32 = 100;
/// No such GPU.
pub const INVALID_DEVICE: u32 = 101;
/// No context is current, or it is gone.
pub const INVALID_CONTEXT: u32 = 201;
/// GPU memory lost bits.
pub const ECC_UNCORRECTABLE: u32 = 214;
/// No such stream, event or allocation.
pub const INVALID_HANDLE: u32 = 400;
/// Not done yet: an answer rather than an error.
pub const NOT_READY: u32 = 600;
/// A kernel or a copy touched memory that it must not.
pub const ILLEGAL_ADDRESS: u32 = 700;
/// Part of the range is registered already.
pub const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
/// No registration begins there.
pub const HOST_MEMORY_NOT_REGISTERED: u32 = 713;
/// A kernel died.
pub const LAUNCH_FAILED: u32 = 719;
/// The operation is not allowed here.
pub const NOT_PERMITTED: u32 = 800;
/// This GPU or system cannot do that.
pub const NOT_SUPPORTED: u32 = 801;
/// Not allowed while a stream is captured.
pub const STREAM_CAPTURE_UNSUPPORTED: u32 = 900;
/// An earlier error has spoilt the capture.
pub const STREAM_CAPTURE_INVALIDATED: u32 = 901;
/// The legacy default stream was used beside a capture.
pub const STREAM_CAPTURE_IMPLICIT: u32 = 906;
/// The driver does not know either.
pub const UNKNOWN: u32 = 999;

/// The driver's own name of a number.
#[must_use]
pub fn name(code: u32) -> &'static str {
    NAMES
        .binary_search_by_key(&code, |(number, _)| *number)
        .map_or("unknown CUDA error", |at| NAMES[at].1)
}

/// Whether the context is unusable after this result, and with it all that CUDA does in
/// this process. The driver API reference says so of most ("the process must be
/// terminated and relaunched"); of 214 and 220 it does not, yet memory or a link that has
/// lost bits cannot be trusted again, and 4 and 709 leave nothing to go on with. 999 is
/// not among them: it may be the matter of one call, and if it is more, the next says so.
#[must_use]
pub fn is_sticky(code: u32) -> bool {
    matches!(
        code,
        DEINITIALIZED
            | ECC_UNCORRECTABLE
            // uncorrectable NVLink error
            | 220
            // contained error
            | 226
            | ILLEGAL_ADDRESS
            // launch timeout
            | 702
            // context destroyed, failed assertion
            | 709..=710
            // stack error, illegal instruction, misaligned address, address space,
            // program counter, launch failed
            | 714..=719
            // tensor memory leak
            | 721
            // terminated by the MPS server
            | 810
            // another device's fault
            | 911
    )
}

/// Whether a refusal to register host memory may be of this host's memory and limits: then
/// more of them, smaller chunks or another time can help. Other numbers say that the call,
/// the context or the device is at fault.
#[must_use]
pub fn refuses_pinning(code: u32) -> bool {
    matches!(
        code,
        OUT_OF_MEMORY
            // the operating system refused
            | 304
            | HOST_MEMORY_ALREADY_REGISTERED
            | NOT_PERMITTED
            | NOT_SUPPORTED
            | UNKNOWN
    )
}

/// Sorted by number.
const NAMES: &[(u32, &str)] = &[
    (0, "CUDA_SUCCESS"),
    (1, "CUDA_ERROR_INVALID_VALUE"),
    (2, "CUDA_ERROR_OUT_OF_MEMORY"),
    (3, "CUDA_ERROR_NOT_INITIALIZED"),
    (4, "CUDA_ERROR_DEINITIALIZED"),
    (5, "CUDA_ERROR_PROFILER_DISABLED"),
    (6, "CUDA_ERROR_PROFILER_NOT_INITIALIZED"),
    (7, "CUDA_ERROR_PROFILER_ALREADY_STARTED"),
    (8, "CUDA_ERROR_PROFILER_ALREADY_STOPPED"),
    (34, "CUDA_ERROR_STUB_LIBRARY"),
    (36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (47, "CUDA_ERROR_MULTICAST_RESOURCE_FULL"),
    (100, "CUDA_ERROR_NO_DEVICE"),
    (101, "CUDA_ERROR_INVALID_DEVICE"),
    (102, "CUDA_ERROR_DEVICE_NOT_LICENSED"),
    (200, "CUDA_ERROR_INVALID_IMAGE"),
    (201, "CUDA_ERROR_INVALID_CONTEXT"),
    (202, "CUDA_ERROR_CONTEXT_ALREADY_CURRENT"),
    (205, "CUDA_ERROR_MAP_FAILED"),
    (206, "CUDA_ERROR_UNMAP_FAILED"),
    (207, "CUDA_ERROR_ARRAY_IS_MAPPED"),
    (208, "CUDA_ERROR_ALREADY_MAPPED"),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (210, "CUDA_ERROR_ALREADY_ACQUIRED"),
    (211, "CUDA_ERROR_NOT_MAPPED"),
    (212, "CUDA_ERROR_NOT_MAPPED_AS_ARRAY"),
    (213, "CUDA_ERROR_NOT_MAPPED_AS_POINTER"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
    (215, "CUDA_ERROR_UNSUPPORTED_LIMIT"),
    (216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE"),
    (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    (218, "CUDA_ERROR_INVALID_PTX"),
    (219, "CUDA_ERROR_INVALID_GRAPHICS_CONTEXT"),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"),
    (221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"),
    (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    (223, "CUDA_ERROR_JIT_COMPILATION_DISABLED"),
    (224, "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY"),
    (225, "CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC"),
    (226, "CUDA_ERROR_CONTAINED"),
    (227, "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION"),
    (300, "CUDA_ERROR_INVALID_SOURCE"),
    (301, "CUDA_ERROR_FILE_NOT_FOUND"),
    (302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND"),
    (303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED"),
    (304, "CUDA_ERROR_OPERATING_SYSTEM"),
    (400, "CUDA_ERROR_INVALID_HANDLE"),
    (401, "CUDA_ERROR_ILLEGAL_STATE"),
    (402, "CUDA_ERROR_LOSSY_QUERY"),
    (500, "CUDA_ERROR_NOT_FOUND"),
    (600, "CUDA_ERROR_NOT_READY"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT"),
    (703, "CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING"),
    (704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"),
    (705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"),
    (708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE"),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (710, "CUDA_ERROR_ASSERT"),
    (711, "CUDA_ERROR_TOO_MANY_PEERS"),
    (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS"),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    (718, "CUDA_ERROR_INVALID_PC"),
    (719, "CUDA_ERROR_LAUNCH_FAILED"),
    (720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"),
    (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK"),
    (800, "CUDA_ERROR_NOT_PERMITTED"),
    (801, "CUDA_ERROR_NOT_SUPPORTED"),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY"),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
    (805, "CUDA_ERROR_MPS_CONNECTION_FAILED"),
    (806, "CUDA_ERROR_MPS_RPC_FAILURE"),
    (807, "CUDA_ERROR_MPS_SERVER_NOT_READY"),
    (808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"),
    (809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED"),
    (810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
    (811, "CUDA_ERROR_CDP_NOT_SUPPORTED"),
    (812, "CUDA_ERROR_CDP_VERSION_MISMATCH"),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (902, "CUDA_ERROR_STREAM_CAPTURE_MERGE"),
    (903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"),
    (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"),
    (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
    (906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    (907, "CUDA_ERROR_CAPTURED_EVENT"),
    (908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"),
    (909, "CUDA_ERROR_TIMEOUT"),
    (910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"),
    (911, "CUDA_ERROR_EXTERNAL_DEVICE"),
    (912, "CUDA_ERROR_INVALID_CLUSTER_SIZE"),
    (913, "CUDA_ERROR_FUNCTION_NOT_LOADED"),
    (914, "CUDA_ERROR_INVALID_RESOURCE_TYPE"),
    (915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"),
    (916, "CUDA_ERROR_KEY_ROTATION"),
    (917, "CUDA_ERROR_STREAM_DETACHED"),
    (918, "CUDA_ERROR_GRAPH_RECAPTURE_FAILURE"),
    (919, "CUDA_ERROR_FABRIC_NOT_READY"),
    (999, "CUDA_ERROR_UNKNOWN"),
];

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(NAMES.is_sorted_by(|one, next| one.0 < next.0));
    }

    #[test]
    fn numbers_are_named_as_in_the_bindings() {
        for result in [
            CUresult::CUDA_SUCCESS,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER,
            CUresult::CUDA_ERROR_NO_DEVICE,
            CUresult::CUDA_ERROR_INSUFFICIENT_LOADER_VERSION,
            CUresult::CUDA_ERROR_NOT_READY,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_FABRIC_NOT_READY,
            CUresult::CUDA_ERROR_UNKNOWN,
        ] {
            assert_eq!(name(result as u32), format!("{result:?}"));
        }
    }

    #[test]
    fn a_number_of_a_newer_driver_is_unknown() {
        for code in [9, 46_000, u32::MAX] {
            assert_eq!(name(code), "unknown CUDA error");
            assert!(!is_sticky(code));
        }
    }

    #[test]
    fn what_a_later_call_may_cure_is_not_sticky() {
        for code in [
            SUCCESS,
            INVALID_VALUE,
            OUT_OF_MEMORY,
            NO_DEVICE,
            INVALID_CONTEXT,
            NOT_READY,
            701,
            704,
            HOST_MEMORY_ALREADY_REGISTERED,
            HOST_MEMORY_NOT_REGISTERED,
            720,
            NOT_PERMITTED,
            STREAM_CAPTURE_INVALIDATED,
            UNKNOWN,
        ] {
            assert!(!is_sticky(code), "{}", name(code));
        }
    }

    #[test]
    fn a_broken_context_does_not_refuse_to_pin() {
        for code in [INVALID_VALUE, NOT_INITIALIZED, INVALID_CONTEXT, 700, 719] {
            assert!(!refuses_pinning(code), "{}", name(code));
        }
        for code in [OUT_OF_MEMORY, 304, 712, 801] {
            assert!(refuses_pinning(code) && !is_sticky(code), "{}", name(code));
        }
    }

    #[test]
    fn what_spoils_the_context_is_sticky() {
        for code in [
            4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911,
        ] {
            assert!(is_sticky(code), "{}", name(code));
        }
    }
}
