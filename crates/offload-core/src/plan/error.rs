//! Why a model cannot be laid out or planned, with what was asked and what would do.

use std::fmt;

use gpu_driver::Bytes;

use crate::schedule::ScheduleError;

/// A refusal to lay out, cut or plan a model. Nothing was allocated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The budget cannot hold the base and one largest unit.
    #[error(
        "a budget of {budget} is too small: this model needs at least {}, {base} for what is always resident \
         and the rest for its largest unit {largest_unit} of {largest_unit_bytes}; raise the budget to the minimum",
        AtLeast(*minimum)
    )]
    BudgetTooSmall {
        /// What was asked for.
        budget: Bytes,
        /// The smallest budget that works, rounding to whole granules included.
        minimum: Bytes,
        /// The name of the largest unit.
        largest_unit: String,
        /// Its bytes.
        largest_unit_bytes: Bytes,
        /// What is resident in any case: base tensors and the small tensors of blocks, in whole granules.
        base: Bytes,
    },
    /// A block or the base names a tensor that has no size.
    #[error("the model names tensor {tensor}, but describes only {count} tensors")]
    NoSuchTensor {
        /// The tensor's number.
        tensor: u32,
        /// How many tensors are described.
        count: usize,
    },
    /// A tensor has two owners.
    #[error(
        "tensor {tensor} is named twice; list a shared tensor once, with the owner that runs first or in the base"
    )]
    TensorTwice {
        /// The tensor's number.
        tensor: u32,
    },
    /// A tensor has no owner.
    #[error("tensor {tensor} is in no block and not in the base; add it to the base")]
    TensorNowhere {
        /// The tensor's number.
        tensor: u32,
    },
    /// The model does not fit in an address range.
    #[error("the model's tensors are together more than {limit}, the most an address range can have")]
    ModelTooLarge {
        /// The largest that works.
        limit: Bytes,
    },
    /// A granule that physical memory cannot come in.
    #[error(
        "a granule of {granule} does not work on a device of granularity {granularity}: it must be a multiple of the \
         granularity, which must be a multiple of 512 bytes, and leave fewer than 2^31 granules"
    )]
    BadGranule {
        /// What was asked for.
        granule: Bytes,
        /// What the device works in.
        granularity: Bytes,
    },
    /// A segment would start where no tensor of the block does.
    #[error(
        "block {block} cannot be cut at offset {cut}: cuts are starts of its tensors, in ascending order, its first excepted"
    )]
    BadCut {
        /// The block's name.
        block: String,
        /// The offset on the address line.
        cut: u64,
    },
    /// The units do not cover a block exactly.
    #[error(
        "the units of {block} do not follow one another from its first byte to its last; make them from this layout"
    )]
    NotTiled {
        /// The block's name.
        block: String,
    },
    /// There is no such block.
    #[error("there is no block {block}; the model has {count}")]
    NoSuchBlock {
        /// The block's number.
        block: u32,
        /// How many there are.
        count: usize,
    },
    /// The order names a unit that does not exist.
    #[error("the order names unit {unit}, but there are only {count}")]
    NoSuchUnit {
        /// The unit's number.
        unit: u32,
        /// How many there are.
        count: usize,
    },
    /// Compute times do not match the order.
    #[error(
        "{given} compute times were given for {visits} unit visits; each must be a finite number of seconds, not negative"
    )]
    BadComputeTimes {
        /// How many were given.
        given: usize,
        /// How many visits a step has.
        visits: usize,
    },
    /// The link's rate is no rate.
    #[error(
        "a link of {bytes_per_second} bytes per second cannot be planned for; give a positive, finite rate"
    )]
    BadLinkRate {
        /// What was given, in text.
        bytes_per_second: String,
    },
    /// The schedule refuses the order a plan is simulated with.
    #[error("the order cannot be simulated")]
    Schedule(#[from] ScheduleError),
    /// A plan breaks one of its own rules: a defect of the planner.
    #[error("the plan is inconsistent: {what}; please report this with the model's sizes and the budget")]
    Inconsistent {
        /// Which rule, with the values.
        what: String,
    },
}

/// A smallest size as [`Bytes`] prints one, but rounded up, so that what is printed is enough when it is asked for.
struct AtLeast(Bytes);

impl fmt::Display for AtLeast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let Bytes(bytes) = self.0;
        for (name, unit) in UNITS {
            if bytes >= unit {
                let hundredths = (u128::from(bytes) * 100).div_ceil(u128::from(unit));
                return write!(f, "{}.{:02} {name} ({bytes} bytes)", hundredths / 100, hundredths % 100);
            }
        }
        write!(f, "{bytes} bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minimum_is_printed_rounded_up() {
        let text = |bytes| AtLeast(Bytes(bytes)).to_string();
        assert_eq!(text(1000), "1000 bytes");
        assert_eq!(text(1 << 20), "1.00 MiB (1048576 bytes)");
        assert_eq!(text((1 << 20) + 1), "1.01 MiB (1048577 bytes)");
        assert_eq!(text((5 << 30) - 1), "5.00 GiB (5368709119 bytes)");
        assert_eq!(text(1536), "1.50 KiB (1536 bytes)");
    }

    #[test]
    fn the_refusal_of_a_budget_names_a_minimum_that_is_enough() {
        let minimum = Bytes((3 << 20) + 4096);
        let error = PlanError::BudgetTooSmall {
            budget: Bytes(1),
            minimum,
            largest_unit: "blocks.1".into(),
            largest_unit_bytes: Bytes(2 << 20),
            base: Bytes(1 << 20),
        };
        assert!(error.to_string().contains("at least 3.01 MiB (3149824 bytes)"), "{error}");
    }
}
