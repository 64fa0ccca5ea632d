//! Plans of thousands of random models, each checked cell by cell by a checker that shares no code with the planner, and
//! walked through by the shipping schedule over a ring of cells.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod models;

use std::collections::{BTreeMap, BTreeSet};

use gpu_driver::Bytes;
use models::Builder;
use offload_core::{
    Backing, BlockId, Command, Layout, LayoutOptions, Plan, PlanError, PlanNote, PlanRequest, Schedule,
    TensorId, UnitId, UnitSet, Units,
};
use proptest::prelude::*;

/// What every address is a multiple of: the smallest piece that can differ.
const CELL: u64 = 512;

/// The budget as a point between nothing and a little more than the whole line.
#[derive(Debug, Clone)]
struct Case {
    base: Vec<u64>,
    towers: Vec<Vec<Vec<u64>>>,
    granularity: u64,
    /// Which tensor starts a segment, by a bit of this.
    cuts: u64,
    /// Numbers an order is drawn from; none for the described order.
    order: Option<Vec<u32>>,
    budget: f64,
    look_ahead: Option<u32>,
    compute: Option<Vec<f64>>,
}

fn case() -> impl Strategy<Value = Case> {
    let size = prop_oneof![1 => 0..2_000_u64, 2 => 2_000..200_000_u64, 3 => 200_000..1_500_000_u64];
    let blocks = prop::collection::vec(prop::collection::vec(size.clone(), 0..5), 0..7);
    let alike =
        (prop::collection::vec(size.clone(), 1..4), 1..9_usize).prop_map(|(block, count)| vec![block; count]);
    let tower = prop_oneof![blocks, alike];
    let granularity = prop_oneof![3 => Just(64_u64 << 10), 1 => Just(2_u64 << 20)];
    let order = prop::option::of(prop::collection::vec(any::<u32>(), 0..30));
    let compute = prop::option::of(prop::collection::vec(0.0..1e-3, 64));
    let look_ahead = prop::option::of(0..4_u32);
    let model = (prop::collection::vec(size, 0..3), prop::collection::vec(tower, 0..4));
    (model, granularity, any::<u64>(), order, 0.0..1.1, look_ahead, compute).prop_map(
        |((base, towers), granularity, cuts, order, budget, look_ahead, compute)| Case {
            base,
            towers,
            granularity,
            cuts,
            order,
            budget,
            look_ahead,
            compute,
        },
    )
}

impl Case {
    fn layout(&self) -> Layout {
        let mut model = Builder::default().base(&self.base);
        for (number, tower) in self.towers.iter().enumerate() {
            model = model.unlike_tower(&format!("tower {number}"), tower);
        }
        let options = LayoutOptions { granularity: Bytes(self.granularity), granule: None };
        Layout::new(&model.build(), &options).unwrap()
    }

    fn units(&self, layout: &Layout) -> Units {
        let mut cuts = BTreeMap::new();
        let mut bits = self.cuts;
        for (number, block) in layout.blocks().iter().enumerate() {
            let mut starts: BTreeSet<u64> = block.tensors.iter().map(|&t| layout.offset(t)).collect();
            starts.remove(&block.span.start);
            starts.remove(&block.span.end);
            bits = bits.rotate_left(7);
            let chosen = starts.into_iter().enumerate().filter(|(place, _)| bits >> place & 1 == 1);
            cuts.insert(BlockId(number as u32), chosen.map(|(_, start)| start).collect());
        }
        let units = Units::segmented(layout, &cuts, None).unwrap();
        let count = units.units.len() as u32;
        let order = match &self.order {
            Some(numbers) if count > 0 => numbers.iter().map(|number| UnitId(number % count)).collect(),
            _ => return units,
        };
        Units::segmented(layout, &cuts, Some(order)).unwrap()
    }

    fn request(&self, layout: &Layout, units: &Units) -> PlanRequest {
        let line = f64::from(layout.granules()) * layout.granule().0 as f64;
        #[allow(clippy::cast_sign_loss, reason = "a part of a size is not negative")]
        let budget = Some(Bytes((line * self.budget) as u64));
        let compute = self
            .compute
            .as_ref()
            .map(|times| (0..units.order.len()).map(|visit| times[visit % 64]).collect());
        PlanRequest {
            budget,
            look_ahead: self.look_ahead,
            compute,
            link_bytes_per_second: 20e9,
            within: None,
        }
    }
}

/// No unit.
const NOBODY: u16 = u16::MAX;

/// The ring cells of each unit, in the order of its bytes.
type RingCells = Vec<Vec<usize>>;

/// Looks at every cell of the line: base and residents are backed, streamed cells are streamed once, by their own unit.
fn check_line(plan: &Plan, layout: &Layout, units: &Units) -> RingCells {
    let per_granule = plan.granule.0 / CELL;
    assert_eq!(plan.backing.len(), layout.granules() as usize);
    let mut streamer = vec![NOBODY; plan.backing.len() * per_granule as usize];
    let mut ring_cells = vec![Vec::new(); units.units.len()];
    for (index, (unit, desc)) in plan.units.iter().zip(&units.units).enumerate() {
        assert_eq!((&unit.span, unit.block), (&desc.span, desc.block));
        assert!(unit.streamed.is_empty() || unit.streamed.start >= unit.span.start);
        assert!(unit.streamed.is_empty() || unit.streamed.end <= unit.span.end);
        for cell in unit.streamed.start / CELL..unit.streamed.end / CELL {
            assert_eq!(std::mem::replace(&mut streamer[cell as usize], index as u16), NOBODY);
            match plan.backing[(cell / per_granule) as usize] {
                Backing::Own => panic!("{} streams a resident cell", unit.name),
                Backing::Ring(page) => {
                    ring_cells[index].push((u64::from(page) * per_granule + cell % per_granule) as usize);
                }
            }
        }
        for cell in unit.span.start / CELL..unit.span.end / CELL {
            let resident = plan.backing[(cell / per_granule) as usize] == Backing::Own;
            assert!(resident != (streamer[cell as usize] == index as u16), "{} at cell {cell}", unit.name);
        }
        let start = ring_cells[index].first().map_or(0, |&cell| cell as u64 * CELL);
        assert_eq!(unit.ring_start, start);
    }
    for tensor in 0..layout.tensors() as u32 {
        let tensor = TensorId(tensor);
        assert_eq!(layout.offset(tensor) % CELL, 0);
        if layout.is_base(tensor) && layout.bytes(tensor).0 > 0 {
            let last = layout.offset(tensor) + layout.bytes(tensor).0 - 1;
            assert!(last / plan.granule.0 < u64::from(plan.base_granules));
        }
    }
    assert!(plan.backing[..plan.base_granules as usize].iter().all(|backing| *backing == Backing::Own));
    ring_cells
}

fn check_conflicts(plan: &Plan, ring_cells: &RingCells) {
    let mut occupants = vec![Vec::new(); (plan.ring_bytes().0 / CELL) as usize];
    for (unit, cells) in ring_cells.iter().enumerate() {
        for &cell in cells {
            assert!(occupants[cell].last() != Some(&unit), "a unit meets itself in the ring");
            occupants[cell].push(unit);
        }
    }
    let mut shared = vec![BTreeSet::new(); ring_cells.len()];
    occupants.dedup();
    for units in &occupants {
        for &unit in units {
            shared[unit]
                .extend(units.iter().filter(|&&other| other != unit).map(|&other| UnitId(other as u32)));
        }
    }
    for (unit, shared) in plan.units.iter().zip(shared) {
        assert_eq!(unit.conflicts, shared.into_iter().collect::<UnitSet>(), "{}", unit.name);
    }
}

fn check_budget(plan: &Plan, budget: Bytes) {
    let own = plan.backing.iter().filter(|backing| **backing == Backing::Own).count() as u64;
    let ring: BTreeSet<u32> = plan.backing.iter().filter_map(|backing| page(*backing)).collect();
    assert_eq!(ring, (0..plan.ring_granules).collect());
    assert_eq!(plan.physical_bytes().0, (own + ring.len() as u64) * plan.granule.0);
    assert!(plan.physical_bytes() <= budget);
    let resident = own == plan.backing.len() as u64;
    assert!(resident || plan.physical_bytes() + plan.granule > budget, "more than a granule is left over");
    let lines = plan.backing.len() as u64 * plan.granule.0;
    assert_eq!(resident, budget.0 >= lines || lines == 0);
    assert!(!resident || plan.streamed_bytes_per_step() == Bytes::ZERO);
}

fn page(backing: Backing) -> Option<u32> {
    match backing {
        Backing::Own => None,
        Backing::Ring(page) => Some(page),
    }
}

/// Every visit of three steps finds all of its cells as its own copy left them.
fn walk(plan: &Plan, ring_cells: &RingCells) {
    let mut schedule = Schedule::for_plan(plan).unwrap();
    let mut content = vec![NOBODY; (plan.ring_bytes().0 / CELL) as usize];
    let mut commands = Vec::new();
    for _ in 0..3 {
        schedule.begin_step(&mut commands);
        for &unit in &plan.order {
            schedule.enter(unit, &mut commands).unwrap();
            for command in commands.drain(..) {
                if let Command::Copy(copied) = command {
                    ring_cells[copied.0 as usize].iter().for_each(|&cell| content[cell] = copied.0 as u16);
                }
            }
            let own = |cell: &usize| content[*cell] == unit.0 as u16;
            assert!(ring_cells[unit.0 as usize].iter().all(own), "{unit:?} is not whole in its turn");
            schedule.leave(unit, &mut commands).unwrap();
        }
        schedule.end_step(&mut commands);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_keep_their_promises(case in case()) {
        let layout = case.layout();
        let units = case.units(&layout);
        let request = case.request(&layout, &units);
        let budget = request.budget.unwrap();
        let largest = units.units.iter().map(|unit| unit.span.end - unit.span.start).max().unwrap_or(0);
        let granule = layout.granule().0;
        let minimum = (u64::from(layout.base_granules()) + largest.div_ceil(granule)) * granule;
        let (request, budget) = match Plan::new(&layout, &units, &request) {
            Err(PlanError::BudgetTooSmall { minimum: stated, largest_unit_bytes, .. }) => {
                prop_assert_eq!((stated.0, largest_unit_bytes.0), (minimum, largest));
                prop_assert!(budget.0 < minimum);
                // What the refusal names must work.
                (PlanRequest { budget: Some(stated), ..request }, stated)
            }
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
            Ok(_) => (request, budget),
        };
        let plan = Plan::new(&layout, &units, &request).unwrap();
        prop_assert_eq!(&plan, &Plan::new(&layout, &units, &request).unwrap(), "the same request, another plan");
        prop_assert!(plan.check(&layout).is_ok());
        let ring_cells = check_line(&plan, &layout, &units);
        check_conflicts(&plan, &ring_cells);
        check_budget(&plan, budget);
        walk(&plan, &ring_cells);
        prop_assert!(request.look_ahead.is_none_or(|asked| plan.look_ahead <= asked));
        let resident = plan.notes.contains(&PlanNote::EverythingResident);
        prop_assert_eq!(resident, plan.ring_granules == 0 && layout.granules() > layout.base_granules());
        // Of a smaller budget, nothing is resident that was not before.
        let lower = Bytes(minimum + (budget.0.saturating_sub(minimum) / 3));
        let within = Some(plan.backing.clone());
        prop_assert!(Plan::check_budget(&layout, &units, Bytes(minimum)).is_ok());
        prop_assert!(minimum == 0 || Plan::check_budget(&layout, &units, Bytes(minimum - 1)).is_err());
        let smaller = Plan::new(&layout, &units, &PlanRequest { budget: Some(lower), within, ..request }).unwrap();
        check_conflicts(&smaller, &check_line(&smaller, &layout, &units));
        check_budget(&smaller, lower);
        let pairs = smaller.backing.iter().zip(&plan.backing);
        prop_assert_eq!(pairs.filter(|(new, old)| **new == Backing::Own && **old != Backing::Own).count(), 0);
        prop_assert_eq!(plan.described_units(), units);
    }
}
