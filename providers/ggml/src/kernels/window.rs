/// How a two-dimensional window moves over an input: height, then width.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Window {
    pub(crate) input: [usize; 2],
    pub(crate) output: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) dilation: [usize; 2],
    /// Zeros before the input; those after it follow from the output.
    pub(crate) pad: [usize; 2],
}

impl Window {
    /// The input position under tap `k` of the window at output position `at`, unless it is padding.
    #[inline(always)]
    pub(crate) fn source(&self, axis: usize, at: usize, k: usize) -> Option<usize> {
        (at * self.stride[axis] + k * self.dilation[axis])
            .checked_sub(self.pad[axis])
            .filter(|i| *i < self.input[axis])
    }
}
