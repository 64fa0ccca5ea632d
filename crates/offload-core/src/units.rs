//! What is copied in one go: whole blocks, or segments of them, and the order a step visits them in.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;

use crate::layout::Layout;
use crate::model::{BlockId, UnitId};
use crate::plan::PlanError;

/// A unit: an interval of the address line inside one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitDesc {
    /// The block it belongs to.
    pub block: BlockId,
    /// Its bytes on the line. The units of a tower follow one another without a gap.
    pub span: Range<u64>,
    /// The block's name, with the segment's number behind it where the block has several.
    pub name: String,
}

/// The units of a model and the order of their visits in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Units {
    /// The units, by [`UnitId`]: in block order, the segments of a block in address order.
    pub units: Vec<UnitDesc>,
    /// The expected visits of one step. A unit may be visited several times, or not at all.
    pub order: Vec<UnitId>,
}

impl Units {
    /// A unit a block, visited once each in the order they were described.
    pub fn whole_blocks(layout: &Layout) -> Self {
        let units: Vec<UnitDesc> = layout
            .blocks()
            .iter()
            .enumerate()
            .map(|(number, block)| UnitDesc {
                block: BlockId(number as u32),
                span: block.span.clone(),
                name: block.name.clone(),
            })
            .collect();
        let order = (0..units.len() as u32).map(UnitId).collect();
        Self { units, order }
    }

    /// Blocks cut in segments, visited in the given order, or once each in unit order if none is given. `cuts` gives for
    /// a block the offsets on the line at which a new segment starts; a block without cuts is one unit.
    ///
    /// # Errors
    /// A cut that is not the start of one of the block's tensors, or is out of order; a block or a unit that does not
    /// exist.
    pub fn segmented(
        layout: &Layout,
        cuts: &BTreeMap<BlockId, Vec<u64>>,
        order: Option<Vec<UnitId>>,
    ) -> Result<Self, PlanError> {
        let count = layout.blocks().len();
        if let Some(block) = cuts.keys().find(|block| block.0 as usize >= count) {
            return Err(PlanError::NoSuchBlock { block: block.0, count });
        }
        let mut units = Vec::with_capacity(count);
        for (number, block) in layout.blocks().iter().enumerate() {
            let id = BlockId(number as u32);
            let cuts = cuts.get(&id).map_or(&[][..], Vec::as_slice);
            let mut start = block.span.start;
            for (segment, &end) in cuts.iter().chain([&block.span.end]).enumerate() {
                let last = segment == cuts.len();
                let at_tensor = last
                    || block.tensors.binary_search_by_key(&end, |&t| layout.offset(t)).is_ok() && end > start;
                if !at_tensor {
                    return Err(PlanError::BadCut { block: block.name.clone(), cut: end });
                }
                let name =
                    if cuts.is_empty() { block.name.clone() } else { format!("{}[{segment}]", block.name) };
                units.push(UnitDesc { block: id, span: start..end, name });
                start = end;
            }
        }
        let order = order.unwrap_or_else(|| (0..units.len() as u32).map(UnitId).collect());
        let units = Self { units, order };
        units.check_order()?;
        Ok(units)
    }

    /// Whether these are units of this layout: they tile its blocks in order, and every visit is of one of them.
    pub(crate) fn check(&self, layout: &Layout) -> Result<(), PlanError> {
        self.check_order()?;
        let mut units = self.units.iter().peekable();
        for (number, block) in layout.blocks().iter().enumerate() {
            let mut end = block.span.start;
            let mut count = 0;
            while let Some(unit) =
                units.next_if(|unit| unit.block.0 as usize == number && unit.span.start == end)
            {
                end = unit.span.end.max(end);
                count += 1;
            }
            if end != block.span.end || count == 0 {
                return Err(PlanError::NotTiled { block: block.name.clone() });
            }
        }
        match units.next() {
            Some(unit) => Err(PlanError::NotTiled { block: unit.name.clone() }),
            None => Ok(()),
        }
    }

    fn check_order(&self) -> Result<(), PlanError> {
        let count = self.units.len();
        match self.order.iter().find(|unit| unit.0 as usize >= count) {
            Some(unit) => Err(PlanError::NoSuchUnit { unit: unit.0, count }),
            None => Ok(()),
        }
    }
}
