use super::{
    super::super::driver::Attribute, Driver as _, FakeDriver, FakeSettings, Ordinal, code, driver,
};

#[test]
fn a_text_sets_every_field_and_nothing_else() {
    let text = "gpus=2,memory=64MiB,granularity=4KiB,visible=1,0,bandwidth=1GiB,seed=s,\
                version=12040,register_limit=4194304,import_twice=refuse,\
                attribute.StreamMemoryOps64=0";
    let settings = FakeSettings::from_text(text).unwrap();
    assert_eq!(settings.memory, 64 << 20);
    assert_eq!(settings.visible, Some(vec![1, 0]));
    let driver = FakeDriver::new(settings);
    assert_eq!(driver.count(), Ok(2));
    assert_eq!(driver.version(), Ok(12_040));
    let ops = driver.attribute(Ordinal(0), Attribute::StreamMemoryOps64);
    assert_eq!(ops, Ok(0));
    let node = driver.attribute(Ordinal(0), Attribute::HostNumaNode);
    assert_eq!(node, Ok(-1));
    assert!(FakeSettings::from_text("").is_ok());
}

#[test]
fn a_text_with_anything_unknown_is_refused() {
    for text in [
        "gpu=1",
        "gpus",
        "gpus=",
        "gpus=one",
        "gpus=1,gpus=2",
        "gpus=1,0",
        "memory=64MB",
        "granularity=3",
        "bandwidth=0",
        "register_fail=3",
        "register_fail=3:0",
        "import_own=allow",
        "attribute.Nothing=1",
        "attribute.ComputeMode=x",
        "gpus=1,",
        "visible=1,0,x",
    ] {
        assert!(FakeSettings::from_text(text).is_err(), "{text}");
    }
}

#[test]
fn uuids_follow_the_seed_and_the_gpu_not_the_order_of_ordinals() {
    let straight = driver("gpus=2,seed=a");
    let reversed = driver("gpus=2,seed=a,visible=1,0");
    let other = driver("gpus=2,seed=b");
    let uuid = |driver: &FakeDriver, ordinal| driver.uuid(Ordinal(ordinal)).unwrap();
    assert_eq!(uuid(&straight, 0), uuid(&reversed, 1));
    assert_eq!(uuid(&straight, 1), uuid(&reversed, 0));
    assert_ne!(uuid(&straight, 0), uuid(&straight, 1));
    assert_ne!(uuid(&straight, 0), uuid(&other, 0));
}

#[test]
fn gpus_after_an_unknown_one_are_not_seen() {
    let driver = FakeDriver::new(FakeSettings::from_text("gpus=2,visible=1,7,0").unwrap());
    assert_eq!(driver.count(), Ok(1));
    assert_eq!(code(driver.uuid(Ordinal(1))), Some(101));
    assert_eq!(code(driver.uuid(Ordinal(-1))), Some(101));
}

#[test]
fn a_prohibited_gpu_gives_no_context() {
    let text = "attribute.ComputeMode=2";
    let driver = FakeDriver::new(FakeSettings::from_text(text).unwrap());
    assert_eq!(code(driver.retain_primary(Ordinal(0))), Some(46));
}

#[test]
fn contexts_are_counted_and_end_with_the_last_release() {
    let driver = driver("gpus=2");
    let context = driver.retain_primary(Ordinal(1)).unwrap();
    assert_eq!(driver.counts().contexts, [1, 1]);
    let stream = driver.create_stream().unwrap();
    // SAFETY: nothing made in either is used again, but to see that it is refused.
    unsafe {
        driver.release_primary(Ordinal(1)).unwrap();
        assert_eq!(code(driver.release_primary(Ordinal(1))), Some(201));
        assert_eq!(code(driver.push(context)), Some(201));
        driver.release_primary(Ordinal(0)).unwrap();
        assert_eq!(code(driver.is_done(stream)), Some(400));
    }
    assert_eq!(driver.counts().contexts, [0, 0]);
}

#[test]
fn calls_that_need_a_context_are_refused_on_a_thread_without_one() {
    let driver = driver("");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(code(driver.memory_info()), Some(201));
            assert_eq!(code(driver.create_stream()), Some(201));
            assert_eq!(code(driver.pop()), Some(201));
        });
    });
    driver.pop().unwrap();
    assert_eq!(code(driver.memory_info()), Some(201));
}
