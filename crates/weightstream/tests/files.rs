//! Models whose bytes are in a file, page-locked and not: the right bytes, typed errors when the file is cut or changed, and
//! nothing left behind.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, unsafe_code, reason = "tests")]

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use gpu_driver::{HostDriver, HostOptions};
use weightstream::{
    Budget, Bytes, EngineOptions, Error, FileBytes, HostError, Levels, Offloader, SourceFile, StagingOptions,
    StoreOptions, StreamHandle, TensorId, UnitId,
};

const LAYERS: u8 = 8;
const LAYER: u64 = 200_000;
const STREAM: StreamHandle = StreamHandle::DEFAULT;

/// Threads and files of the process are counted, so that no two tests may run at once.
static ALONE: Mutex<()> = Mutex::new(());

struct Model {
    file: tempfile::NamedTempFile,
    driver: Arc<HostDriver>,
}

impl Model {
    /// Layer n is all n + 1.
    fn new() -> Self {
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.write_all(&content()).unwrap();
        let driver = Arc::new(HostDriver::new(HostOptions::new(Bytes::mib(64))).unwrap());
        Self { file, driver }
    }

    fn attach(&self, levels: Levels) -> Offloader {
        let mut model = Offloader::builder(self.driver.clone());
        let ids: Vec<TensorId> =
            (0..LAYERS).map(|layer| model.tensor(format!("layers.{layer}.weight"), Bytes(LAYER))).collect();
        model.tower("layers", ids.iter().map(|&id| (format!("layers.{}", id.0), vec![id])).collect());
        model.budget(Budget::Bytes(Bytes(3 * LAYER)));
        model.store_options(StoreOptions { levels, min_mapped: Bytes(1), ..StoreOptions::default() });
        let staging = StagingOptions { bytes: Some(Bytes::kib(256)), ..StagingOptions::default() };
        model.engine_options(EngineOptions { staging, ..EngineOptions::default() });
        let mut planned = model.plan().unwrap();
        let file = SourceFile::open(self.file.path()).unwrap();
        for &id in &ids {
            let bytes = FileBytes::new(&file, 16 + u64::from(id.0) * LAYER, Bytes(LAYER)).unwrap();
            planned.source(vec![(id, bytes)]).unwrap();
        }
        planned.start().unwrap()
    }

    /// Takes bytes of the file away, does something, and makes it what it was.
    fn cut<T>(&self, act: impl FnOnce() -> T) -> T {
        let file = self.file.as_file();
        let written = file.metadata().unwrap().modified().unwrap();
        file.set_len(LAYER).unwrap();
        let done = act();
        std::fs::write(self.file.path(), content()).unwrap();
        file.set_modified(written).unwrap();
        done
    }
}

fn content() -> Vec<u8> {
    let layers = (0..LAYERS).flat_map(|layer| vec![layer + 1; LAYER as usize]);
    std::iter::repeat_n(0xEE, 16).chain(layers).collect()
}

fn visit(offloader: &Offloader, layer: u32) -> Result<(), Error> {
    offloader.enter(UnitId(layer), STREAM)?;
    let address = offloader.address(TensorId(layer))?.0 as *const u8;
    for at in [0, LAYER / 2, LAYER - 1] {
        // SAFETY: the emulator's addresses are this process's, and the unit is present between enter and leave.
        assert_eq!(u32::from(unsafe { address.wrapping_add(at as usize).read() }), layer + 1);
    }
    offloader.leave(UnitId(layer), STREAM)
}

fn step(offloader: &Offloader) -> Result<(), Error> {
    offloader.begin_step(STREAM)?;
    (0..u32::from(LAYERS)).try_for_each(|layer| visit(offloader, layer))?;
    offloader.end_step(STREAM)
}

#[test]
fn a_model_streams_from_its_file_locked_and_not() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for levels in [Levels::ALL, Levels::NONE] {
        let model = Model::new();
        let offloader = model.attach(levels);
        for _ in 0..3 {
            step(&offloader).unwrap();
        }
        let report = offloader.report();
        let unlocked = levels == Levels::NONE;
        assert_eq!((offloader.is_staged(), report.engine.staging.is_some()), (unlocked, unlocked));
        assert_eq!(report.engine.stats.staged_bytes > 0, unlocked);
        assert!(offloader.source_bytes(TensorId(0)).unwrap().size() == Bytes(LAYER));
        offloader.close(STREAM).unwrap();
        drop(offloader);
        assert!(model.driver.counters().nothing_alive(), "{:?}", model.driver.counters());
    }
}

#[test]
fn a_file_changed_between_steps_is_refused_when_the_next_begins() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for levels in [Levels::ALL, Levels::NONE] {
        let model = Model::new();
        let offloader = model.attach(levels);
        step(&offloader).unwrap();
        let refused = model.cut(|| offloader.begin_step(STREAM)).unwrap_err();
        assert!(matches!(refused, Error::Host(HostError::FileChanged { .. })), "{refused}");
        // Pages that are locked are not the file's any more once it was cut; what is read anew is.
        if levels == Levels::NONE {
            // What was read ahead while the file was cut may fail one more step.
            if let Err(error) = step(&offloader) {
                assert!(matches!(error, Error::Unread { .. }), "{error}");
            }
            step(&offloader).unwrap();
        }
        offloader.close(STREAM).unwrap();
    }
}

#[test]
fn a_file_cut_in_a_step_is_an_error_that_names_the_tensor_and_the_next_step_works() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = Model::new();
    let offloader = model.attach(Levels::NONE);
    step(&offloader).unwrap();
    offloader.begin_step(STREAM).unwrap();
    let failed = model.cut(|| {
        for _ in 0..2 {
            // Nothing read ahead lasts for two rounds.
            (0..u32::from(LAYERS)).try_for_each(|layer| visit(&offloader, layer))?;
        }
        offloader.end_step(STREAM)
    });
    let Error::Unread { name, cause } = failed.unwrap_err() else { panic!("the cut was not noticed") };
    assert!(name.starts_with("layers."), "{name}");
    assert!(matches!(cause, HostError::FileChanged { .. }), "{cause}");
    step(&offloader).unwrap();
    assert_eq!(offloader.stats().recoveries, 1);
    offloader.close(STREAM).unwrap();
}

#[test]
fn twenty_models_leave_no_thread_no_file_and_no_lock() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = Model::new();
    let count = || -> (usize, usize) {
        let entries = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        (entries("/proc/self/task"), entries("/proc/self/fd"))
    };
    let before = count();
    for round in 0..20 {
        let offloader = model.attach(if round % 3 == 0 { Levels::ALL } else { Levels::NONE });
        step(&offloader).unwrap();
        offloader.close(STREAM).unwrap();
    }
    let after = count();
    // A thread that ended may still be listed for a moment.
    assert!(after.0 <= before.0 + 1 && after.1 == before.1, "{before:?} became {after:?}");
    assert!(model.driver.counters().nothing_alive());
}
