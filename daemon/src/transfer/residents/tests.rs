use std::os::fd::AsFd as _;

use flextensord_device::{
    cpu::CpuDevice,
    mapping::{Access, Mapping},
    memfd,
};
use flextensord_proto::layout::LABEL_BYTES;

use super::*;

fn setting() -> (Arc<DeviceMemory>, Residents, BlockRequest) {
    let device = Arc::new(CpuDevice::new("t", 0, 1 << 20, None).unwrap());
    let memory = DeviceMemory::new("t", 1, device, Arc::default());
    let file = memfd::create("s", 8192).unwrap();
    let segment = Mapping::new(file.as_fd(), 8192, Access::ReadWrite).unwrap();
    segment.write(0, &[3; 8192]).unwrap();
    let request = BlockRequest {
        key: BlockKey {
            uid: 1,
            weight_set: "w".into(),
            storages: vec![0],
        },
        bytes: LABEL_BYTES + 8192,
        contents: vec![(
            LABEL_BYTES,
            Source {
                segment: Arc::new(segment),
                offset: 0,
                bytes: 8192,
            },
        )],
    };
    (Arc::clone(&memory), Residents::new(memory), request)
}

#[test]
fn a_block_is_filled_once_and_freed_with_its_last_user() {
    let (memory, residents, request) = setting();
    let requests = std::slice::from_ref(&request);
    let mut one = residents.get(requests, 1000).unwrap();
    assert_eq!((one.shared_bytes, memory.reserved_bytes()), (0, 1000));
    let mut two = residents.get(requests, 0).unwrap();
    assert_eq!(two.shared_bytes, request.bytes);
    let (one, two) = {
        let blocks = (one.blocks.remove(0), two.blocks.remove(0));
        drop((one, two));
        blocks
    };
    assert!(Arc::ptr_eq(&one, &two));
    assert_eq!(residents.bytes(), request.bytes);
    let exported = one.allocation().memory.export().unwrap();
    let view = Mapping::new(exported.as_fd(), 8448, Access::Read).unwrap();
    drop(exported);
    assert!(view.equals(256, &[3; 8192]).unwrap());
    drop((one, two));
    assert_eq!(residents.bytes(), 0);
    assert_eq!(memory.reclaiming_bytes(), request.bytes);
    drop(view);
    memory.sweep();
    assert_eq!(memory.available(), 1 << 20);
}

#[test]
fn another_user_gets_a_block_of_its_own() {
    let (_memory, residents, request) = setting();
    let one = residents.get(std::slice::from_ref(&request), 0).unwrap();
    let key = BlockKey {
        uid: 2,
        ..request.key.clone()
    };
    let other = BlockRequest {
        key,
        contents: request.contents.clone(),
        ..request
    };
    let two = residents.get(std::slice::from_ref(&other), 0).unwrap();
    assert_eq!(two.shared_bytes, 0);
    assert!(!Arc::ptr_eq(&one.blocks[0], &two.blocks[0]));
}

#[test]
fn a_failed_plan_leaves_the_place_free() {
    let (memory, residents, request) = setting();
    let requests = std::slice::from_ref(&request);
    assert!(residents.get(requests, 1 << 20).is_err());
    assert_eq!(memory.available(), 1 << 20);
    assert!(residents.get(requests, 0).is_ok());
}

#[test]
fn managers_that_plan_the_same_block_at_once_fill_it_once() {
    let (memory, residents, request) = setting();
    let granted: Vec<Granted> = thread::scope(|scope| {
        let get = || residents.get(std::slice::from_ref(&request), 0).unwrap();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(get)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(memory.available(), (1 << 20) - request.bytes);
    assert!(
        granted
            .windows(2)
            .all(|w| Arc::ptr_eq(&w[0].blocks[0], &w[1].blocks[0]))
    );
}
