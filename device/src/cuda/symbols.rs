//! The functions of the driver's library: which are needed, which are used where there
//! are, each with its reason; and the table of their addresses, looked up once.
//!
//! Every function returns its result as a number. The bindings make it a Rust enum, of
//! which a driver newer than they are would make an invalid value. Contexts, streams and
//! events are numbers here too: pointers of the driver's that nobody but it follows.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;
use libloading::Library;

use super::error::CudaError;

/// A function of the driver, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbol {
    /// As the library has it.
    pub name: &'static str,
    /// The name by which older drivers have it, where that serves as well.
    pub older: Option<&'static str>,
    /// What it is for.
    pub reason: &'static str,
}

/// A function that was found.
#[derive(Clone, Copy)]
pub(super) struct Found<F> {
    pub(super) name: &'static str,
    pub(super) function: F,
}

/// `CUcontext`, `CUstream` or `CUevent`: as large as a pointer and passed like one.
type Handle = usize;

macro_rules! older {
    () => {
        None
    };
    ($older:ident) => {
        Some(stringify!($older))
    };
}

macro_rules! functions {
    (
        required { $(#[doc = $why:literal] $field:ident: $symbol:ident $(or $older:ident)? ($($argument:ty),*);)* }
        optional { $(#[doc = $maybe_why:literal] $maybe:ident: $maybe_symbol:ident ($($maybe_argument:ty),*);)* }
    ) => {
        /// Functions without which there is no data plane on a GPU.
        pub const REQUIRED: &[Symbol] = &[$(Symbol {
            name: stringify!($symbol),
            older: older!($($older)?),
            reason: $why.trim_ascii(),
        }),*];

        /// Functions that are used where the driver has them.
        pub const OPTIONAL: &[Symbol] = &[$(Symbol {
            name: stringify!($maybe_symbol),
            older: None,
            reason: $maybe_why.trim_ascii(),
        }),*];

        /// Addresses of the driver's functions.
        pub(super) struct Functions {
            $(pub(super) $field: Found<unsafe extern "C" fn($($argument),*) -> u32>,)*
            $(pub(super) $maybe: Option<Found<unsafe extern "C" fn($($maybe_argument),*) -> u32>>,)*
        }

        impl Functions {
            /// Looks all of them up.
            ///
            /// # Safety
            /// The library is a CUDA driver, or has functions of these names that take
            /// and return the same; it stays loaded as long as the table is used.
            ///
            /// # Errors
            /// All required ones that are missing.
            pub(super) unsafe fn find(library: &Library) -> Result<Self, CudaError> {
                // SAFETY: the caller vouches for the library.
                let missing = || unsafe { missing(library) };
                Ok(Self {
                    // SAFETY: the types stand beside the names as the driver API
                    // reference has them, and the caller vouches for the library.
                    $($field: unsafe {
                        find(library, stringify!($symbol)) $(.or_else(|| find(library, stringify!($older))))?
                    }
                    .ok_or_else(missing)?,)*
                    // SAFETY: as above.
                    $($maybe: unsafe { find(library, stringify!($maybe_symbol)) },)*
                })
            }
        }
    };
}

/// # Safety
/// `F` is the type of the function of that name, a pointer to a function.
unsafe fn find<F: Copy>(library: &Library, name: &'static str) -> Option<Found<F>> {
    // a null address is a symbol without a function: `Option` takes it for none
    // SAFETY: the caller says that the type fits; an `Option` of a pointer to a function
    // has its size and layout.
    let symbol = unsafe { library.get::<Option<F>>(name) }.ok()?;
    let function = (*symbol)?;
    Some(Found { name, function })
}

/// Names every required function that the library lacks.
///
/// # Safety
/// The library is a CUDA driver, or has functions of these names.
unsafe fn missing(library: &Library) -> CudaError {
    // SAFETY: functions under these names, as the caller says; none of them is called.
    let there = |name| unsafe { find::<unsafe extern "C" fn()>(library, name) }.is_some();
    let lacks = |symbol: &&Symbol| !there(symbol.name) && !symbol.older.is_some_and(there);
    CudaError::MissingSymbol {
        symbols: REQUIRED.iter().filter(lacks).map(|s| s.name).collect(),
    }
}

functions! {
    required {
        /// starts the driver
        init: cuInit(c_uint);
        /// the driver's version, for reports
        driver_version: cuDriverGetVersion(*mut c_int);
        /// how many GPUs there are
        device_count: cuDeviceGetCount(*mut c_int);
        /// the driver's handle of a GPU
        device_get: cuDeviceGet(*mut sys::CUdevice, c_int);
        /// the product's name, for reports
        device_name: cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
        /// what a GPU is known by in every process; the second version knows MIG
        device_uuid: cuDeviceGetUuid_v2(*mut [u8; 16], sys::CUdevice);
        /// size of GPU memory
        device_total_memory: cuDeviceTotalMem_v2(*mut usize, sys::CUdevice);
        /// what a GPU can do
        device_attribute: cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice);
        /// the context that PyTorch uses too
        primary_retain: cuDevicePrimaryCtxRetain(*mut Handle, sys::CUdevice);
        /// gives the primary context back
        primary_release: cuDevicePrimaryCtxRelease_v2(sys::CUdevice);
        /// makes a context current
        context_push: cuCtxPushCurrent_v2(Handle);
        /// spares the two around it where a context is current already
        context_current: cuCtxGetCurrent(*mut Handle);
        /// gives the thread its former context back
        context_pop: cuCtxPopCurrent_v2(*mut Handle);
        /// free memory, for budgets
        memory_info: cuMemGetInfo_v2(*mut usize, *mut usize);
        /// pins segments and control pages in place
        host_register: cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        /// lets pinned memory go
        host_unregister: cuMemHostUnregister(*mut c_void);
        /// where the GPU sees the slot words
        host_device_pointer: cuMemHostGetDevicePointer_v2(*mut sys::CUdeviceptr, *mut c_void, c_uint);
        /// the unit of GPU memory
        granularity: cuMemGetAllocationGranularity(*mut usize, *const sys::CUmemAllocationProp, sys::CUmemAllocationGranularity_flags);
        /// makes GPU memory that can be shared
        memory_create: cuMemCreate(*mut sys::CUmemGenericAllocationHandle, usize, *const sys::CUmemAllocationProp, u64);
        /// lets GPU memory go
        memory_release: cuMemRelease(sys::CUmemGenericAllocationHandle);
        /// GPU memory as a descriptor for clients
        memory_export: cuMemExportToShareableHandle(*mut c_void, sys::CUmemGenericAllocationHandle, sys::CUmemAllocationHandleType, u64);
        /// GPU memory of the daemon in a client
        memory_import: cuMemImportFromShareableHandle(*mut sys::CUmemGenericAllocationHandle, *mut c_void, sys::CUmemAllocationHandleType);
        /// addresses for GPU memory
        address_reserve: cuMemAddressReserve(*mut sys::CUdeviceptr, usize, usize, sys::CUdeviceptr, u64);
        /// gives addresses back
        address_free: cuMemAddressFree(sys::CUdeviceptr, usize);
        /// GPU memory at an address
        memory_map: cuMemMap(sys::CUdeviceptr, usize, usize, sys::CUmemGenericAllocationHandle, u64);
        /// takes GPU memory off an address
        memory_unmap: cuMemUnmap(sys::CUdeviceptr, usize);
        /// read-only for clients
        set_access: cuMemSetAccess(sys::CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
        /// the stream of weights to the GPU
        copy_in: cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, Handle);
        /// reads GPU memory back
        copy_out: cuMemcpyDtoHAsync_v2(*mut c_void, sys::CUdeviceptr, usize, Handle);
        /// fills GPU memory without a copy
        fill: cuMemsetD8Async(sys::CUdeviceptr, u8, usize, Handle);
        /// streams of the daemon
        stream_create: cuStreamCreate(*mut Handle, c_uint);
        /// lets a stream go
        stream_destroy: cuStreamDestroy_v2(Handle);
        /// progress without waiting, and errors of what ran
        stream_query: cuStreamQuery(Handle);
        /// order between streams
        stream_wait_event: cuStreamWaitEvent(Handle, Handle, c_uint);
        /// the hand-over on the GPU; the second version needs no switch in the driver
        stream_batch: cuStreamBatchMemOp_v2(Handle, c_uint, *mut sys::CUstreamBatchMemOpParams, c_uint);
        /// whether a graph is being captured
        stream_is_capturing: cuStreamIsCapturing(Handle, *mut u32);
        /// marks in streams
        event_create: cuEventCreate(*mut Handle, c_uint);
        /// lets an event go
        event_destroy: cuEventDestroy_v2(Handle);
        /// sets a mark
        event_record: cuEventRecord(Handle, Handle);
        /// whether a mark is reached
        event_query: cuEventQuery(Handle);
        /// the measured link
        event_elapsed: cuEventElapsedTime_v2 or cuEventElapsedTime(*mut f32, Handle, Handle);
    }
    optional {
        /// tells one capture from another, since 12.3
        capture_info_v3: cuStreamGetCaptureInfo_v3(Handle, *mut u32, *mut u64, *mut Handle, *mut *const Handle, *mut *const sys::CUgraphEdgeData, *mut usize);
        /// tells one capture from another, before 12.3
        capture_info_v2: cuStreamGetCaptureInfo_v2(Handle, *mut u32, *mut u64, *mut Handle, *mut *const Handle, *mut usize);
    }
}
