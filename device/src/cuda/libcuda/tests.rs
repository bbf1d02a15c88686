//! Against libraries made for each test: there may be no driver where this runs.

use std::{
    fmt::Write as _,
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::io::{FdFlags, fcntl_getfd};
use tempfile::TempDir;

use super::{
    super::{
        driver::{
            AllocationHandle, Attribute, BATCH_LIMIT, Capture, EventHandle, Ordinal, StreamHandle,
            StreamOp,
        },
        symbols::{OPTIONAL, REQUIRED, Symbol},
    },
    *,
};

/// A driver that says `0` to everything, but for the functions that `source` has itself
/// and those that it is to lack.
fn library(folder: &TempDir, source: &str, without: &[&str]) -> PathBuf {
    let mut text = source.to_owned();
    for symbol in REQUIRED {
        for name in [Some(symbol.name), symbol.older].into_iter().flatten() {
            if !without.contains(&name) && !source.contains(&format!("{name}(")) {
                writeln!(text, "int {name}() {{ return 0; }}").expect("written");
            }
        }
    }
    let (code, object) = (
        folder.path().join("driver.c"),
        folder.path().join("driver.so"),
    );
    fs::write(&code, text).expect("written");
    let status = Command::new("cc")
        .args(["-w", "-shared", "-fPIC", "-o"])
        .args([&object, &code])
        .status()
        .expect("a C compiler runs");
    assert!(status.success(), "{status}");
    object
}

fn load_stub(source: &str, without: &[&str]) -> Result<Arc<dyn Driver>, CudaError> {
    let folder = TempDir::new().expect("a scratch directory");
    load_from(&library(&folder, source, without))
}

#[test]
fn no_library_is_no_driver() {
    let path = Path::new("/nowhere/libcuda.so.1");
    let error = load_from(path).expect_err("nothing there");
    assert!(
        matches!(&error, CudaError::NoDriver { tried } if tried.contains("/nowhere/libcuda.so.1")),
        "{error}"
    );
    assert!(error.to_string().starts_with("no CUDA driver: "), "{error}");
}

#[test]
fn what_is_no_library_is_no_driver() {
    let file = tempfile::NamedTempFile::new().expect("a scratch file");
    fs::write(file.path(), "not a library").expect("written");
    let error = load_from(file.path()).expect_err("not a library");
    assert!(matches!(&error, CudaError::NoDriver { .. }), "{error}");
}

#[test]
fn the_system_driver_loads_or_says_what_was_tried() {
    match (load(), load()) {
        (Ok(first), Ok(second)) => assert!(Arc::ptr_eq(&first, &second)),
        (Err(CudaError::NoDriver { tried }), Err(_)) => {
            for name in NAMES {
                assert!(tried.contains(name), "{tried}");
            }
        }
        // a driver without a GPU, or a toolkit's stub
        (Err(CudaError::Call { call, .. }), Err(_)) => assert_eq!(call, "cuInit"),
        (first, second) => panic!("{first:?}, then {second:?}"),
    }
}

#[test]
fn each_required_symbol_is_named_when_it_is_missing() {
    for missing in ["cuInit", "cuMemHostRegister_v2", "cuStreamBatchMemOp_v2"] {
        let error = load_stub("", &[missing]).expect_err("a symbol is missing");
        assert_eq!(
            error,
            CudaError::MissingSymbol {
                symbols: vec![missing]
            }
        );
        assert!(error.to_string().contains(missing), "{error}");
    }
}

#[test]
fn all_missing_symbols_are_named_at_once() {
    let without = ["cuMemCreate", "cuEventQuery"];
    let error = load_stub("", &without).expect_err("two symbols are missing");
    let text = error.to_string();
    assert!(without.iter().all(|name| text.contains(name)), "{text}");
}

#[test]
fn an_older_name_serves_and_none_does_not() {
    let (newer, older) = ("cuEventElapsedTime_v2", "cuEventElapsedTime");
    let body = "int cuEventElapsedTime(float *to, long one, long other) { *to = 1.5f; return 0; }";
    let driver = load_stub(body, &[newer]).expect("loads");
    // SAFETY: the library under test follows no handle.
    let elapsed = unsafe { driver.elapsed_ms(EventHandle(1), EventHandle(2)) };
    assert_eq!(elapsed, Ok(1.5));
    let error = load_stub("", &[newer, older]).expect_err("neither is there");
    assert_eq!(
        error,
        CudaError::MissingSymbol {
            symbols: vec![newer]
        }
    );
}

#[test]
fn a_driver_without_a_gpu_is_an_error_with_number_and_name() {
    let error = load_stub("int cuInit(unsigned flags) { return 100; }", &[]).expect_err("no GPU");
    assert_eq!(
        error,
        CudaError::Call {
            call: "cuInit",
            code: code::NO_DEVICE
        }
    );
    assert_eq!(
        error.to_string(),
        "cuInit failed: CUDA_ERROR_NO_DEVICE (100)"
    );
}

#[test]
fn a_number_of_a_newer_driver_is_an_error_like_any_other() {
    let driver = load_stub("int cuDeviceGetCount(int *to) { return 12345; }", &[]).expect("loads");
    let error = driver.count().expect_err("refused");
    assert_eq!(
        error.to_string(),
        "cuDeviceGetCount failed: unknown CUDA error (12345)"
    );
}

#[test]
fn not_ready_is_an_answer() {
    let body = "int cuStreamQuery(long it) { return it; } int cuEventQuery(long it) { return it; }";
    let driver = load_stub(body, &[]).expect("loads");
    for (code, stream_answer, event_answer) in [
        (0, Ok(true), Ok(true)),
        (600, Ok(false), Ok(false)),
        (700, Err("cuStreamQuery"), Err("cuEventQuery")),
    ] {
        let failure = |call| CudaError::Call { call, code: 700 };
        // SAFETY: the library under test follows no handle.
        unsafe {
            assert_eq!(
                driver.is_done(StreamHandle(code)),
                stream_answer.map_err(failure)
            );
            assert_eq!(
                driver.has_passed(EventHandle(code)),
                event_answer.map_err(failure)
            );
        }
    }
}

#[test]
fn an_exported_descriptor_is_closed_on_exec() {
    let body = r#"
        #include <fcntl.h>
        #include <unistd.h>
        int cuMemExportToShareableHandle(void *to, unsigned long long handle, int type, unsigned long long flags) {
            if (handle != 7 || type != 1 || flags != 0) return 1;
            *(int *)to = open("/dev/null", O_RDONLY);
            return 0;
        }
        int cuMemImportFromShareableHandle(unsigned long long *to, void *from, int type) {
            if (type != 1 || fcntl((int)(long)from, F_GETFD) < 0) return 1;
            *to = 8;
            return 0;
        }"#;
    let driver = load_stub(body, &[]).expect("loads");
    // SAFETY: the library under test follows no handle.
    let descriptor = unsafe { driver.export(AllocationHandle(7)) }.expect("exported");
    let flags = fcntl_getfd(&descriptor).expect("open");
    assert!(flags.contains(FdFlags::CLOEXEC));
    assert_eq!(driver.import(descriptor.as_fd()), Ok(AllocationHandle(8)));
}

/// The layouts as the driver API reference has them, in C.
const LAYOUTS: &str = r"
    typedef unsigned long long u64;
    struct step { int kind; u64 address, value; unsigned flags; u64 alias, rest; };
    int cuStreamBatchMemOp_v2(long stream, unsigned count, struct step *it, unsigned flags) {
        if (stream != 3 || flags != 0 || sizeof *it != 48) return 1;
        if (count != 3) return count == 255 ? 0 : 2;
        if (it[0].kind != 1 || it[0].address != 0x1000 || it[0].value != 5 || it[0].flags != 1) return 3;
        if (it[1].kind != 2 || it[1].address != 0x1004 || it[1].value != ~0u || it[1].flags != 0) return 4;
        if (it[2].kind != 5 || it[2].address != 0x1008 || it[2].value != ~0ull || it[2].flags != 0) return 5;
        return 0;
    }
    int cuDeviceGet(int *to, int gpu) { *to = gpu + 40; return 0; }
    int cuDeviceGetAttribute(int *to, int number, int device) { *to = number; return device != 43; }
    int cuDeviceGetName(char *to, int room, int device) {
        for (int i = 0; i < room; i++) to[i] = i < 3 ? 'A' + i : 0;
        return room != 256 || device != 43;
    }
    int cuDeviceGetUuid_v2(char *to, int device) {
        for (int i = 0; i < 16; i++) to[i] = 0xf0 + i;
        return device != 43;
    }
    struct memory { int type, handles, place, id; void *unused; unsigned char rest[8]; };
    int cuMemCreate(u64 *to, u64 bytes, struct memory *it, u64 flags) {
        *to = bytes;
        return flags != 0 || it->type != 1 || it->handles != 1 || it->place != 1 || it->id != 3;
    }
    int cuMemHostRegister_v2(void *at, u64 bytes, unsigned flags) { return flags; }
    int cuStreamCreate(long *to, unsigned flags) { *to = 3; return flags != 1; }
    int cuEventCreate(long *to, unsigned flags) { *to = flags; return 0; }
    int cuStreamIsCapturing(long stream, int *to) { *to = stream; return 0; }
";

#[test]
fn the_driver_is_told_what_was_meant() {
    let driver = load_stub(LAYOUTS, &[]).expect("loads");
    let gpu = Ordinal(3);
    assert_eq!(driver.name(gpu).expect("a name"), "ABC");
    assert_eq!(driver.uuid(gpu).expect("a UUID")[15], 0xff);
    // the numbers in cuda.h
    for (attribute, number) in [
        (Attribute::StreamMemoryOps64, 122),
        (Attribute::PosixDescriptors, 103),
        (Attribute::VirtualMemory, 102),
        (Attribute::HostRegister, 99),
        (Attribute::ComputeMode, 20),
        (Attribute::HostNumaNode, 134),
        (Attribute::AsyncEngines, 40),
        (Attribute::Integrated, 18),
        (Attribute::ComputeMajor, 75),
        (Attribute::ComputeMinor, 76),
        (Attribute::PciBus, 33),
        (Attribute::PciDevice, 34),
        (Attribute::PciDomain, 50),
    ] {
        assert_eq!(driver.attribute(gpu, attribute), Ok(number));
    }
    assert_eq!(driver.create(gpu, 4096), Ok(AllocationHandle(4096)));
    assert_eq!(driver.create_stream(), Ok(StreamHandle(3)));
    assert_eq!(driver.create_event(true), Ok(EventHandle(0)));
    assert_eq!(driver.create_event(false), Ok(EventHandle(2)));
    for (mapped, flags) in [(false, 1), (true, 3)] {
        // SAFETY: the library under test pins nothing.
        let outcome = unsafe { driver.register(4096, 4096, mapped) };
        assert_eq!(outcome.expect_err("the flags").code(), Some(flags));
    }
}

#[test]
fn a_batch_is_laid_out_as_the_driver_reads_it() {
    let driver = load_stub(LAYOUTS, &[]).expect("loads");
    let (stream, address) = (StreamHandle(3), 0x1000);
    let wait = StreamOp::WaitEqual32 { address, value: 5 };
    let ops = [
        wait,
        StreamOp::Write32 {
            address: address + 4,
            value: u32::MAX,
        },
        StreamOp::Write64 {
            address: address + 8,
            value: u64::MAX,
        },
    ];
    // SAFETY: the library under test follows no handle and no address.
    unsafe {
        assert_eq!(driver.batch(stream, &ops), Ok(()));
        assert_eq!(driver.batch(stream, &[wait; BATCH_LIMIT]), Ok(()));
        assert_eq!(driver.batch(stream, &[]), Ok(()), "the driver is not asked");
        let outcome = driver.batch(stream, &[wait; BATCH_LIMIT + 1]);
        assert!(matches!(outcome, Err(CudaError::State(_))), "{outcome:?}");
    }
}

#[test]
fn captures_are_told_apart_where_the_driver_can() {
    let v3 = "int cuStreamGetCaptureInfo_v3(long stream, int *status, unsigned long long *id,
        long *graph, long *nodes, long *edges, long *count) {
        if (!graph || !nodes || !edges || !count) return 402;
        *status = stream; *id = 33; return 0; }";
    let v2 = "int cuStreamGetCaptureInfo_v2(long stream, int *status, unsigned long long *id,
        long *graph, long *nodes, long *count) { *status = stream; *id = 22; return 0; }";
    let asked = [0, 1, 2, 3];
    for (source, id) in [
        (format!("{LAYOUTS}{v3}{v2}"), 33),
        (format!("{LAYOUTS}{v2}"), 22),
        (LAYOUTS.to_owned(), 0),
    ] {
        let driver = load_stub(&source, &[]).expect("loads");
        // SAFETY: the library under test follows no handle.
        let answers = asked.map(|status| unsafe { driver.capture(StreamHandle(status)) });
        let expected = [
            Capture::None,
            Capture::Active(id),
            Capture::Invalidated,
            Capture::Invalidated,
        ];
        assert_eq!(answers, expected.map(Ok));
    }
}

#[test]
fn every_symbol_has_a_reason_and_stands_once() {
    let all: Vec<&Symbol> = REQUIRED.iter().chain(OPTIONAL).collect();
    for (at, symbol) in all.iter().enumerate() {
        assert!(!symbol.reason.is_empty(), "{symbol:?}");
        assert!(all[at + 1..].iter().all(|other| other.name != symbol.name));
    }
}
