//! Residents: in which order they lie, and how they are cut into blocks.

use flextensord_proto::layout::LABEL_BYTES;

use crate::{BLOCK_BYTES, SMALL_BYTES, output::Block, problem::Problem, spread};

/// Blocks of a model that is not large: a driver makes memory in units of 2 MiB, and each
/// block wastes half of one.
const BLOCKS: u64 = 8;

/// The order in which residents lie, and how they are cut.
#[derive(Debug)]
pub(crate) struct Residence {
    /// All parts that need a place: small ones first, then by size, the smallest first; of
    /// one size those first that are the last to stream. What streams in one plan and not in
    /// another is near the end then, and all blocks before it are shared.
    order: Vec<u32>,
    full: u64,
}

impl Residence {
    pub(crate) fn new(problem: &Problem) -> Self {
        let mut order = Vec::with_capacity(problem.bytes.len());
        let mut small: Vec<u32> = problem.movable(true);
        small.retain(|part| problem.bytes[*part as usize] < SMALL_BYTES);
        small.sort_by_key(|part| (std::cmp::Reverse(problem.taken[*part as usize]), *part));
        order.extend(small);
        for class in spread::classes(problem, false).iter().rev() {
            order.extend(class.parts_nested().iter().rev());
        }
        Self {
            order,
            full: (problem.all_taken / BLOCKS).clamp(BLOCK_BYTES.0, BLOCK_BYTES.1),
        }
    }

    /// Bytes of the blocks when all parts but those that stream are resident.
    pub(crate) fn bytes(&self, problem: &Problem, streams: &[bool]) -> u64 {
        let (mut all, mut open) = (0, 0_u64);
        self.cut(problem, streams, |part, fresh| {
            if fresh {
                all += problem.whole(open);
                open = LABEL_BYTES;
            }
            open += problem.taken[part as usize];
        });
        all + problem.whole(open)
    }

    /// The blocks when all parts but those that stream are resident.
    pub(crate) fn blocks(&self, problem: &Problem, streams: &[bool]) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        self.cut(problem, streams, |part, fresh| {
            let bytes = problem.taken[part as usize];
            match blocks.last_mut().filter(|_| !fresh) {
                Some(block) => {
                    block.bytes += bytes;
                    block.parts.push(part);
                }
                None => blocks.push(Block {
                    bytes: LABEL_BYTES + bytes,
                    parts: vec![part],
                }),
            }
        });
        for block in &mut blocks {
            block.bytes = problem.whole(block.bytes);
        }
        blocks
    }

    /// Tells of each resident, and whether it begins a block. The cuts are those of all
    /// parts, whether they stream or not, so they do not depend on the budget.
    fn cut(&self, problem: &Problem, streams: &[bool], mut tell: impl FnMut(u32, bool)) {
        let (mut open, mut fresh) = (0, true);
        for &part in &self.order {
            let bytes = problem.taken[part as usize];
            if open >= self.full || open + bytes > BLOCK_BYTES.1 {
                (open, fresh) = (0, true);
            }
            open += bytes;
            if !streams[part as usize] {
                tell(part, fresh);
                fresh = false;
            }
        }
    }
}
