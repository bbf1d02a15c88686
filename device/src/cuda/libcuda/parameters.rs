//! What the driver's calls are told, in the bindings' types.

use std::ptr;

use cudarc::driver::sys::{
    self, CUdevice_attribute as Number, CUmemAccess_flags, CUmemAllocationHandleType,
    CUmemAllocationType, CUmemLocationType, CUstreamBatchMemOpParams, CUstreamBatchMemOpType,
    CUstreamWaitValue_flags, CUstreamWriteValue_flags,
};

use super::super::driver::{Attribute, DeviceAccess, Ordinal, StreamOp};

/// How physical memory travels between processes.
pub(super) const SHARED_AS: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The driver's number of an attribute. 64-bit stream operations have two: the older one
/// (93) tells of the first version of the calls, off unless the kernel module is told.
pub(super) fn number(attribute: Attribute) -> Number {
    match attribute {
        Attribute::StreamMemoryOps64 => Number::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
        Attribute::PosixDescriptors => {
            Number::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        }
        Attribute::VirtualMemory => Number::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        Attribute::HostRegister => Number::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
        Attribute::ComputeMode => Number::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
        Attribute::HostNumaNode => Number::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
        Attribute::AsyncEngines => Number::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT,
        Attribute::Integrated => Number::CU_DEVICE_ATTRIBUTE_INTEGRATED,
        Attribute::ComputeMajor => Number::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        Attribute::ComputeMinor => Number::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        Attribute::PciBus => Number::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
        Attribute::PciDevice => Number::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
        Attribute::PciDomain => Number::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
    }
}

/// The memory of a GPU.
fn location(gpu: Ordinal) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        __bindgen_anon_1: sys::CUmemLocation_st__bindgen_ty_1 { id: gpu.0 },
    }
}

/// Physical memory of a GPU that can be exported.
pub(super) fn shareable(gpu: Ordinal) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: SHARED_AS,
        location: location(gpu),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// What a GPU may do with a mapping.
pub(super) fn access(gpu: Ordinal, access: DeviceAccess) -> sys::CUmemAccessDesc {
    sys::CUmemAccessDesc {
        location: location(gpu),
        flags: match access {
            DeviceAccess::None => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
            DeviceAccess::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            DeviceAccess::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        },
    }
}

/// One step of a batch.
pub(super) fn step(op: StreamOp) -> CUstreamBatchMemOpParams {
    // the driver copies the whole union: what a step does not use is zero
    let mut params = CUstreamBatchMemOpParams { pad: [0; 6] };
    match op {
        StreamOp::WaitEqual32 { address, value } => {
            params.waitValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32;
            params.waitValue.address = address;
            params.waitValue.__bindgen_anon_1.value = value;
            params.waitValue.flags = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
        }
        StreamOp::Write32 { address, value } => {
            params.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
            params.writeValue.address = address;
            params.writeValue.__bindgen_anon_1.value = value;
            params.writeValue.flags =
                CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        }
        StreamOp::Write64 { address, value } => {
            params.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
            params.writeValue.address = address;
            params.writeValue.__bindgen_anon_1.value64 = value;
            params.writeValue.flags =
                CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        }
    }
    params
}
