//! The order of a graph's nodes, and which of them run in place, so that the graph needs less memory.

/// A node of the graph.
#[derive(Debug)]
pub(super) struct Step {
    /// The steps whose results it reads.
    pub(super) reads: Vec<usize>,
    /// Bytes of its result.
    pub(super) bytes: usize,
    /// The step whose result it can overwrite, once nothing else needs that.
    pub(super) over: Option<usize>,
}

/// Reorders steps and marks in-place ones. A step runs in place if it is the last to read the result that it can overwrite. A later
/// reader of that result moves before it if its own result is smaller, as with convolutions on the shortcuts of residual blocks: the
/// smaller result then lives longer, but the larger one shorter.
pub(super) fn plan(steps: &[Step]) -> (Vec<usize>, Vec<bool>) {
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); steps.len()];
    for (index, step) in steps.iter().enumerate() {
        step.reads.iter().for_each(|read| readers[*read].push(index));
    }
    let mut order: Vec<usize> = (0..steps.len()).collect();
    let mut place = order.clone();
    let mut over = vec![false; steps.len()];
    for (index, step) in steps.iter().enumerate() {
        let Some(target) = step.over else { continue };
        let (here, larger) = (place[index], steps[target].bytes);
        let later: Vec<usize> =
            readers[target].iter().copied().filter(|reader| place[*reader] > here).collect();
        let movable = |reader: &usize| {
            let step = &steps[*reader];
            !over[*reader] && step.bytes < larger && step.reads.iter().all(|read| place[*read] < here)
        };
        if !later.iter().all(movable) {
            continue;
        }
        over[index] = true;
        if !later.is_empty() {
            order.retain(|step| !later.contains(step));
            order.splice(here..here, later);
            order.iter().enumerate().for_each(|(at, step)| place[*step] = at);
        }
    }
    (order, over)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(reads: &[usize], bytes: usize, over: Option<usize>) -> Step {
        Step { reads: reads.to_vec(), bytes, over }
    }

    #[test]
    fn the_last_reader_writes_over_what_it_reads() {
        let steps =
            [step(&[], 8, None), step(&[0], 8, Some(0)), step(&[1], 8, Some(1)), step(&[2, 1], 8, None)];
        // A later step that cannot move reads the second result again.
        assert_eq!(plan(&steps), (vec![0, 1, 2, 3], vec![false, true, false, false]));
    }

    #[test]
    fn shortcuts_that_make_less_go_first() {
        let block = |shortcut: usize| {
            [
                step(&[], 8, None),
                step(&[0], 8, Some(0)),
                step(&[1], 4, None),
                step(&[2], 4, Some(2)),
                step(&[0], shortcut, None),
                step(&[3, 4], 4, None),
            ]
        };
        let (order, over) = plan(&block(4));
        assert_eq!(order, [0, 4, 1, 2, 3, 5]);
        assert_eq!(over, [false, true, false, true, false, false]);
        let (order, over) = plan(&block(8));
        assert_eq!(order, [0, 1, 2, 3, 4, 5]);
        assert_eq!(over, [false, false, false, true, false, false]);
    }

    proptest::proptest! {
        #[test]
        fn every_result_is_there_when_it_is_read(
            graph in proptest::collection::vec(
                (proptest::collection::vec(0usize..64, 0..3), 1usize..5, proptest::bool::ANY),
                1..40,
            )
        ) {
            let steps: Vec<Step> = graph.iter().enumerate().map(|(index, (reads, bytes, over))| {
                let mut reads: Vec<usize> =
                    reads.iter().filter(|_| index > 0).map(|read| read % index.max(1)).collect();
                reads.sort_unstable();
                reads.dedup();
                let over = reads.first().copied().filter(|_| *over);
                Step { reads, bytes: *bytes, over }
            }).collect();
            let (order, over) = plan(&steps);
            // The step whose result each step's memory holds.
            let mut holder: Vec<Option<usize>> = vec![None; steps.len()];
            let mut memory: Vec<usize> = (0..steps.len()).collect();
            for index in order {
                for read in &steps[index].reads {
                    proptest::prop_assert_eq!(holder[memory[*read]], Some(*read));
                }
                if over[index] {
                    memory[index] = memory[steps[index].over.unwrap()];
                }
                holder[memory[index]] = Some(index);
            }
        }
    }
}
