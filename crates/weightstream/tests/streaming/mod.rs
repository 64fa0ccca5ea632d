//! One suite for every device: a model whose bytes are read back through a stream while they stream through another.
//!
//! The compute of these tests is a copy back to the host on a stream of its own, so that it is as asynchronous as a
//! kernel: a missing wait reads another unit's bytes.
#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::unwrap_used,
    reason = "shared by the tests of this folder, each of which uses a part"
)]

use std::collections::BTreeMap;
use std::sync::Arc;

use pinned_pool::TransferStream;
use weightstream::{
    BlockId, Budget, Bytes, DeviceAddress, Driver, EngineOptions, HostBytes, Levels, Offloader,
    OffloaderBuilder, StoreOptions, TensorId, UnitId,
};

/// A tensor and what it must read as.
pub type Known = (TensorId, Arc<Vec<u8>>);

/// A model with its bytes.
pub struct Model {
    pub base: Vec<Arc<Vec<u8>>>,
    /// Tower, block, tensor.
    pub towers: Vec<Vec<Vec<Arc<Vec<u8>>>>>,
}

/// Tensors of sizes that no page divides, in two towers of unlike blocks. `unit` scales all of it.
pub fn model(unit: usize) -> Model {
    model_of(unit, 1)
}

/// As [`model`], with other bytes for every seed.
pub fn model_of(unit: usize, mut seed: u64) -> Model {
    let mut tensor = |size: usize| {
        let byte = |_| {
            seed = u64::wrapping_mul(seed, 6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 56) as u8
        };
        Arc::new((0..size).map(byte).collect::<Vec<u8>>())
    };
    let base = vec![tensor(unit + 3), tensor(17)];
    let even =
        (0..6).map(|_| vec![tensor(unit), tensor(2 * unit + 40), tensor(96), tensor(unit / 2)]).collect();
    let uneven =
        (0..5).map(|block| vec![tensor(unit * (1 + block % 3)), tensor(unit + 512 * block)]).collect();
    Model { base, towers: vec![even, uneven] }
}

impl Model {
    pub fn bytes(&self) -> u64 {
        let all = self.base.iter().chain(self.towers.iter().flatten().flatten());
        all.map(|tensor| tensor.len() as u64).sum()
    }
}

/// A model attached to a device, with what every tensor must read as.
pub struct Attached {
    pub offloader: Offloader,
    pub compute: TransferStream,
    base: Vec<Known>,
    /// By block, in address order.
    blocks: Vec<Vec<Known>>,
    /// By unit: the tensors read in its turn.
    turns: Vec<Vec<Known>>,
}

/// Describes a model to a builder: the base and the blocks with their tensors.
fn describe(builder: &mut OffloaderBuilder, model: &Model) -> [Vec<Vec<Known>>; 2] {
    let mut named = |name: String, bytes: &Arc<Vec<u8>>| {
        (builder.tensor(name, Bytes(bytes.len() as u64)), Arc::clone(bytes))
    };
    let base: Vec<_> =
        model.base.iter().enumerate().map(|(n, bytes)| named(format!("base.{n}"), bytes)).collect();
    let mut towers = Vec::new();
    for (t, tower) in model.towers.iter().enumerate() {
        let mut blocks = Vec::new();
        for (b, block) in tower.iter().enumerate() {
            let tensors = block.iter().enumerate();
            blocks.push(tensors.map(|(n, bytes)| named(format!("{t}.{b}.{n}"), bytes)).collect::<Vec<_>>());
        }
        towers.push(blocks);
    }
    builder.base(base.iter().map(|(id, _)| *id));
    for (t, blocks) in towers.iter().enumerate() {
        let ids = |block: &Vec<Known>| block.iter().map(|(id, _)| *id).collect();
        let named = blocks.iter().enumerate().map(|(b, block)| (format!("{t}.{b}"), ids(block)));
        builder.tower(format!("tower {t}"), named.collect());
    }
    [vec![base], towers.concat()]
}

/// Attaches a model with poison on, so that a use outside a unit's turn shows.
pub fn attach(driver: &Arc<dyn Driver>, model: &Model, budget: u64, store: StoreOptions) -> Attached {
    attach_with(driver, model, budget, store, |_| {}).unwrap()
}

/// As [`attach`], with more to say to the builder.
pub fn attach_with(
    driver: &Arc<dyn Driver>,
    model: &Model,
    budget: u64,
    store: StoreOptions,
    more: impl FnOnce(&mut OffloaderBuilder),
) -> weightstream::Result<Attached> {
    let mut builder = Offloader::builder(Arc::clone(driver));
    let [mut base, blocks] = describe(&mut builder, model);
    builder.budget(Budget::Bytes(Bytes(budget)));
    builder.engine_options(EngineOptions { poison_after_use: true, ..EngineOptions::default() });
    builder.store_options(store);
    more(&mut builder);
    let mut planned = builder.plan()?;
    for group in base.iter().chain(&blocks) {
        planned.source(group.iter().map(|(id, bytes)| (*id, HostBytes::of(bytes))).collect())?;
    }
    let offloader = planned.start()?;
    let compute = TransferStream::new(Arc::clone(driver))?;
    let turns = blocks.clone();
    Ok(Attached { offloader, compute, base: base.remove(0), blocks, turns })
}

impl Attached {
    /// Runs a step that visits the units in `order`, and checks every byte of every visit.
    pub fn step(&self, order: &[u32]) {
        self.try_step(order).unwrap();
    }

    /// As [`step`](Self::step), but calls may fail.
    pub fn try_step(&self, order: &[u32]) -> weightstream::Result<()> {
        let stream = self.compute.handle();
        let mut reads = Vec::new();
        self.offloader.begin_step(stream)?;
        self.read(&self.base, &mut reads);
        for &unit in order {
            self.offloader.enter(UnitId(unit), stream)?;
            self.read(&self.turns[unit as usize], &mut reads);
            self.offloader.leave(UnitId(unit), stream)?;
        }
        self.offloader.end_step(stream)?;
        for (name, expected, pending) in reads {
            assert!(
                pending.finish().unwrap() == *expected,
                "{name:?} read other bytes in the order {order:?}"
            );
        }
        self.compute.drain().unwrap();
        Ok(())
    }

    /// Begins to read the base outside any step, as a module without a unit would.
    pub fn begin_base(&self) -> Vec<(Arc<Vec<u8>>, pinned_pool::PendingRead)> {
        let mut reads = Vec::new();
        self.read(&self.base, &mut reads);
        reads.into_iter().map(|(_, bytes, pending)| (bytes, pending)).collect()
    }

    /// Whether some of the base reads as nothing but poison.
    pub fn is_poisoned(&self) -> bool {
        let space = self.offloader.lease();
        let (id, bytes) = &self.base[0];
        let mut read = vec![0; bytes.len()];
        let offset = self.offloader.address(*id).unwrap().0 - space.address().0;
        self.compute.read_back(&space, offset, &mut read).unwrap();
        read.iter().all(|&byte| byte == 0xFF)
    }

    fn read(&self, tensors: &[Known], reads: &mut Vec<(TensorId, Arc<Vec<u8>>, pinned_pool::PendingRead)>) {
        let space = self.offloader.lease();
        for (id, bytes) in tensors {
            let offset = self.offloader.address(*id).unwrap().0 - space.address().0;
            let size = self.offloader.size(*id).unwrap();
            reads.push((*id, Arc::clone(bytes), self.compute.begin_read(&space, offset, size).unwrap()));
        }
    }

    /// Every unit once, in address order.
    pub fn all(&self) -> Vec<u32> {
        (0..self.turns.len() as u32).collect()
    }

    /// Lets every block be cut before its second tensor.
    pub fn segment(&mut self) {
        let cut = |block: &Vec<Known>| vec![block[1].0];
        let cuts: BTreeMap<BlockId, Vec<TensorId>> =
            self.blocks.iter().enumerate().map(|(b, block)| (BlockId(b as u32), cut(block))).collect();
        let units = self.offloader.segment(&cuts, None).unwrap();
        let parts = self.blocks.iter().flat_map(|block| [&block[..1], &block[1..]]);
        self.turns = vec![Vec::new(); units.last().map_or(0, |unit| unit.0 as usize + 1)];
        for (unit, part) in units.iter().zip(parts) {
            self.turns[unit.0 as usize].extend_from_slice(part);
        }
    }

    pub fn peak(&self) -> u64 {
        self.offloader.report().engine.page_bytes_peak
    }
}

/// The whole suite on one device; `unit` is about a page.
pub fn suite(driver: &Arc<dyn Driver>, unit: usize) {
    let model = model(unit);
    let whole = model.bytes();
    for share in [45, 60, 80, 200] {
        let budget = whole * share / 100;
        // Where the bytes are page-locked: as far as possible in place, in a slab, nowhere.
        for (slab_only, levels) in [(false, Levels::ALL), (true, Levels::ALL), (false, Levels::NONE)] {
            let min_in_place = Bytes(unit as u64);
            let store = StoreOptions { slab_only, levels, min_in_place, ..StoreOptions::default() };
            let mut attached = attach(driver, &model, budget, store);
            let all = attached.all();
            attached.step(&all);
            attached.step(&all);
            let stats = attached.offloader.stats();
            assert_eq!(stats.copies == 0, share == 200, "{share} % copied {} units", stats.copies);
            assert_eq!(stats.staged_bytes > 0, levels == Levels::NONE);
            attached.step(&[0, 1, 1, 3, 7, 2, 10]);
            attached.step(&[]);
            attached.step(&all);
            attached.segment();
            for _ in 0..3 {
                attached.step(&attached.all());
            }
            assert!(attached.peak() <= budget, "{} of {budget} bytes", attached.peak());
            attached.offloader.close(attached.compute.handle()).unwrap();
        }
    }
}

impl Attached {
    /// The tensors of a unit.
    pub fn turn(&self, unit: usize) -> Vec<TensorId> {
        self.turns[unit].iter().map(|(id, _)| *id).collect()
    }

    /// Whether a tensor of some unit is at this address still.
    pub fn turns_have(&self, address: DeviceAddress) -> bool {
        self.turns.iter().flatten().any(|(id, _)| self.offloader.address(*id).unwrap() == address)
    }

    /// Checks the bytes of a unit that is present, without entering it.
    pub fn check_turn(&self, unit: usize) {
        let mut reads = Vec::new();
        self.read(&self.turns[unit], &mut reads);
        for (name, expected, pending) in reads {
            assert!(pending.finish().unwrap() == *expected, "{name:?} read other bytes");
        }
    }
}
