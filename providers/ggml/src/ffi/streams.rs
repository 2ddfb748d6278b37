//! Weights that do not fit into the memory of a device. They lie in main memory and take turns in a part of the device's memory.
//!
//! That part has two halves. Weights that follow each other in the graph share a half ([`share`]). While the device computes with one
//! half, a thread copies the next weights into the other ([`Turns`]).

use super::api::*;
use std::{
    cell::Cell,
    collections::{BTreeSet, HashMap},
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    thread::Scope,
};

/// The place of a weight during its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// The number of the turn. Even turns are in the first half.
    pub(super) turn: usize,
    /// The offset in the half, in bytes.
    pub(super) offset: usize,
}

/// How weights share the memory of a device.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Bytes of each half.
    pub(super) half: usize,
    /// The slot of each weight. `None` if it stays on the device.
    pub(super) slots: Vec<Option<Slot>>,
}

/// Weights smaller than this stay on the device. There are many of them, but together they are small.
const SMALL: usize = 1 << 14;
/// The largest half, unless a weight is larger.
const HALF: usize = 64 << 20;

/// Divides a budget among weights of these sizes, which are multiples of the device's alignment, in the order of their use. Weights
/// that stay are spread evenly among those that take turns, so that the device always has work during a copy.
///
/// # Errors
/// The smallest budget that suffices.
pub(super) fn share(sizes: &[usize], budget: usize) -> Result<Share, usize> {
    let small: usize = sizes.iter().filter(|size| **size < SMALL).sum();
    let large = || sizes.iter().copied().filter(|size| *size >= SMALL);
    let (total, largest): (usize, usize) = (large().sum(), large().max().unwrap_or(0));
    if small + total <= budget {
        return Ok(Share { half: 0, slots: vec![None; sizes.len()] });
    }
    let least = small + 2 * largest;
    if budget < least {
        return Err(least);
    }
    let half = largest.max(HALF.min((budget - small) / 8));
    let half = if small + 2 * half <= budget { half } else { largest };
    let stays = (budget - small - 2 * half) as u128;
    let (mut seen, mut kept, mut slot) = (0u128, 0u128, Slot { turn: 0, offset: 0 });
    let slots = sizes.iter().map(|size| {
        if *size < SMALL {
            return None;
        }
        seen += *size as u128;
        if (kept + *size as u128) * total as u128 <= stays * seen {
            kept += *size as u128;
            return None;
        }
        if slot.offset + size > half {
            slot = Slot { turn: slot.turn + 1, offset: 0 };
        }
        let own = slot;
        slot.offset += size;
        Some(own)
    });
    let slots = slots.collect();
    Ok(Share { half, slots })
}

/// A turn that must be loaded before a node runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) turn: usize,
    /// The number of nodes after which its half is free.
    free: usize,
    /// The first node that reads it.
    needed: usize,
}

/// Returns the loads that the nodes need, in order. `uses` has the turns that each node reads.
///
/// # Errors
/// The index of a node that reads two turns of one half.
pub(super) fn schedule(uses: &[Vec<usize>]) -> Result<Vec<Load>, usize> {
    let (mut present, mut end) = ([None; 2], [0; 2]);
    let mut loads = Vec::new();
    for (node, turns) in uses.iter().enumerate() {
        for turn in turns {
            let half = turn % 2;
            if turns.iter().any(|other| other != turn && other % 2 == half) {
                return Err(node);
            }
            if present[half] != Some(*turn) {
                loads.push(Load { turn: *turn, free: end[half], needed: node });
                present[half] = Some(*turn);
            }
        }
        turns.iter().for_each(|turn| end[turn % 2] = node + 1);
    }
    Ok(loads)
}

/// A tensor on the device, and the tensor in main memory that holds its elements.
#[derive(Clone, Copy)]
pub(super) struct Twins {
    pub(super) device: TensorPtr,
    pub(super) host: TensorPtr,
}

/// The weights of each turn.
#[derive(Default)]
pub(super) struct Streams {
    pub(super) turns: Vec<Vec<Twins>>,
    /// The turn of a tensor on the device.
    pub(super) turn_of: HashMap<TensorPtr, usize>,
}

// SAFETY: the tensors belong to a store and are only read through this value. ggml ties none of them to a thread.
unsafe impl Send for Streams {}
// SAFETY: as above.
unsafe impl Sync for Streams {}

impl Streams {
    /// Adds a weight to a turn. Weights must come in the order of their turns.
    pub(super) fn add(&mut self, turn: usize, twins: Twins) {
        self.turns.resize(self.turns.len().max(turn + 1), Vec::new());
        self.turns[turn].push(twins);
        self.turn_of.insert(twins.device, turn);
    }

    /// Copies the weights of a turn to the device.
    ///
    /// # Safety
    /// During the call, nothing writes the weights, and nothing else accesses their half.
    unsafe fn load(&self, api: &Api, turn: usize) {
        for twins in &self.turns[turn] {
            // SAFETY: both have memory of the same size, and the data of the host's tensor is addressable.
            unsafe {
                let bytes = (api.ggml_nbytes)(twins.device);
                (api.ggml_backend_tensor_set)(twins.device, (*twins.host).data, 0, bytes);
            }
        }
    }
}

/// The turns of a program.
pub(super) struct Plan {
    pub(super) streams: Arc<Streams>,
    loads: Vec<Load>,
    /// The index of each node.
    nodes: HashMap<TensorPtr, usize>,
    /// The numbers of finished nodes at which copies start or must have finished.
    stops: BTreeSet<usize>,
}

impl Plan {
    /// # Errors
    /// As [`schedule`].
    pub(super) fn new(
        streams: Arc<Streams>,
        nodes: &[TensorPtr],
        uses: &[Vec<usize>],
    ) -> Result<Self, usize> {
        let loads = schedule(uses)?;
        let stops = loads.iter().flat_map(|load| [load.free, load.needed]).collect();
        let nodes = nodes.iter().enumerate().map(|(i, raw)| (*raw, i)).collect();
        Ok(Plan { streams, loads, nodes, stops })
    }

    /// The tensors that a run copies.
    pub(super) fn copied(&self) -> impl Iterator<Item = TensorPtr> {
        self.loads.iter().flat_map(|load| self.streams.turns[load.turn].iter().map(|twins| twins.device))
    }
}

/// A run in which weights take turns.
pub(super) struct Turns<'a> {
    plan: &'a Plan,
    cancelled: &'a dyn Fn() -> bool,
    /// Requests to copy a turn, and notices of finished copies.
    ask: mpsc::Sender<usize>,
    done: mpsc::Receiver<()>,
    asked: Cell<usize>,
    came: Cell<usize>,
    /// Whether the run must stop.
    stopped: Cell<bool>,
}

impl<'a> Turns<'a> {
    /// Starts the thread that copies, which ends when the value is dropped. Returns when the first weights are on the device.
    ///
    /// # Safety
    /// As long as the value lives, nothing writes the weights, and only the nodes of the plan read those on the device.
    pub(super) unsafe fn start<'scope>(
        plan: &'a Plan,
        api: &'static Api,
        cancelled: &'a dyn Fn() -> bool,
        scope: &'scope Scope<'scope, '_>,
    ) -> Self
    where
        'a: 'scope,
    {
        let ((ask, asked), (tell, done)) = (mpsc::channel(), mpsc::channel());
        let streams = &plan.streams;
        scope.spawn(move || {
            for turn in asked {
                // SAFETY: by this function's contract. A turn is requested only when its half is free.
                unsafe { streams.load(api, turn) };
                if tell.send(()).is_err() {
                    return;
                }
            }
        });
        let (asked, came, stopped) = (Cell::new(0), Cell::new(0), Cell::new(false));
        let turns = Turns { plan, cancelled, ask, done, asked, came, stopped };
        turns.reach(0);
        turns
    }

    /// Handles the end of node `count`: requests copies into free halves, and waits for those that the next node needs.
    fn reach(&self, count: usize) {
        let next = |from: &Cell<usize>| self.plan.loads.get(from.get());
        while let Some(load) = next(&self.asked).filter(|load| load.free <= count) {
            self.stopped.set(self.stopped.get() || self.ask.send(load.turn).is_err());
            self.asked.set(self.asked.get() + 1);
        }
        while next(&self.came).is_some_and(|load| load.needed <= count) {
            self.stopped.set(self.stopped.get() || self.done.recv().is_err());
            self.came.set(self.came.get() + 1);
        }
    }

    /// With `ask`, returns whether ggml must call again after this node. Without, does the work after the node and returns whether the
    /// run continues.
    fn at(&self, node: TensorPtr, ask: bool) -> bool {
        let Some(count) = self.plan.nodes.get(&node).map(|index| index + 1) else { return !ask };
        let stops = self.stopped.get() || self.plan.stops.contains(&count);
        if ask {
            return stops;
        }
        self.reach(count);
        self.stopped.set(self.stopped.get() || (self.cancelled)());
        !self.stopped.get()
    }

    /// Whether all weights arrived and the run was not cancelled.
    pub(super) fn succeeded(&self) -> bool {
        !self.stopped.get()
    }
}

/// The callback of ggml's scheduler for each node. With `ask`, it returns whether ggml must call again after the node.
///
/// # Safety
/// `data` is a [`Turns`].
pub(super) unsafe extern "C" fn at_node(node: TensorPtr, ask: bool, data: *mut c_void) -> bool {
    // SAFETY: by this function's contract.
    let turns = unsafe { &*data.cast::<Turns<'_>>() };
    catch_unwind(AssertUnwindSafe(|| turns.at(node, ask))).unwrap_or_else(|_| {
        turns.stopped.set(true);
        ask
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::ops::Range;

    fn bytes_of(share: &Share, sizes: &[usize]) -> usize {
        let stays: usize = sizes.iter().zip(&share.slots).filter(|(_, s)| s.is_none()).map(|(n, _)| n).sum();
        stays + 2 * share.half
    }

    #[test]
    fn what_fits_stays() {
        let sizes = [SMALL, 32, 3 * SMALL];
        assert_eq!(share(&sizes, 4 * SMALL + 32).unwrap().slots, [None; 3]);
        assert_eq!(share(&sizes, 4 * SMALL), Err(6 * SMALL + 32));
        assert_eq!(share(&[], 0).unwrap().slots, []);
    }

    proptest! {
        #[test]
        fn shares_keep_to_the_budget_and_slots_do_not_overlap(
            sizes in prop::collection::vec((1usize..200).prop_map(|n| n * 1024), 1..60),
            part in 0usize..100,
        ) {
            let budget = sizes.iter().sum::<usize>() * part / 100;
            match share(&sizes, budget) {
                Err(least) => {
                    prop_assert!(least > budget);
                    prop_assert!(share(&sizes, least).is_ok());
                }
                Ok(share) => {
                    prop_assert!(bytes_of(&share, &sizes) <= budget.max(sizes.iter().sum()));
                    let mut taken: HashMap<usize, Vec<Range<usize>>> = HashMap::new();
                    let slots = sizes.iter().zip(&share.slots).filter_map(|(n, slot)| Some((n, (*slot)?)));
                    let mut last = 0;
                    for (size, slot) in slots {
                        prop_assert!(slot.turn >= last && slot.offset + size <= share.half);
                        last = slot.turn;
                        let own = slot.offset..slot.offset + size;
                        let others = taken.entry(slot.turn).or_default();
                        prop_assert!(others.iter().all(|o| o.end <= own.start || own.end <= o.start));
                        others.push(own);
                    }
                    if last > 0 {
                        prop_assert!(bytes_of(&share, &sizes) <= budget);
                    }
                }
            }
        }

        #[test]
        fn every_turn_has_come_when_it_is_read(
            steps in prop::collection::vec(prop::option::of(-1isize..3), 1..200),
        ) {
            let mut turn = 0isize;
            let uses: Vec<Vec<usize>> = steps
                .iter()
                .map(|step| {
                    step.map(|step| {
                        turn = (turn + step).max(0);
                        turn as usize
                    })
                    .into_iter()
                    .collect()
                })
                .collect();
            let loads = schedule(&uses).unwrap();
            let mut halves = [None; 2];
            let mut next = 0;
            for (node, turns) in uses.iter().enumerate() {
                while let Some(load) = loads.get(next).filter(|load| load.needed <= node) {
                    prop_assert!(load.free <= load.needed);
                    // No node reads the half from the time it is free until this turn is loaded.
                    let idle = &uses[load.free..load.needed];
                    prop_assert!(idle.iter().flatten().all(|turn| turn % 2 != load.turn % 2));
                    halves[load.turn % 2] = Some(load.turn);
                    next += 1;
                }
                for turn in turns {
                    prop_assert_eq!(halves[turn % 2], Some(*turn));
                }
            }
            prop_assert_eq!(next, loads.len());
        }
    }

    #[test]
    fn two_turns_of_one_half_are_refused() {
        assert_eq!(schedule(&[vec![0, 1], vec![0, 2]]), Err(1));
    }
}
