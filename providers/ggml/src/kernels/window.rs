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
    /// Whether each output sees the input at its own place alone.
    pub(crate) fn is_pointwise(&self) -> bool {
        (self.kernel, self.stride, self.pad) == ([1, 1], [1, 1], [0, 0]) && self.input == self.output
    }

    /// By how much the rows (or columns) of a plane, of one phase of the strides, exceed the outputs that see it.
    #[inline(always)]
    pub(super) fn reach(&self, axis: usize) -> usize {
        (self.kernel[axis] - 1) * self.dilation[axis] / self.stride[axis]
    }

    /// Whether some tap sees the inputs of a phase of the stride.
    #[inline(always)]
    pub(super) fn sees(&self, axis: usize, phase: usize) -> bool {
        (0..self.kernel[axis]).any(|k| k * self.dilation[axis] % self.stride[axis] == phase)
    }

    /// Where a tap begins to read a channel's planes of this many rows and columns, one for each phase of the strides.
    pub(super) fn tap(&self, tap: usize, plane: [usize; 2]) -> usize {
        let [sy, sx] = self.stride;
        let (y, x) = (tap / self.kernel[1] * self.dilation[0], tap % self.kernel[1] * self.dilation[1]);
        ((y % sy * sx + x % sx) * plane[0] + y / sy) * plane[1] + x / sx
    }

    /// The input position under tap `k` of the window at output position `at`, unless it is padding.
    #[inline(always)]
    pub(crate) fn source(&self, axis: usize, at: usize, k: usize) -> Option<usize> {
        (at * self.stride[axis] + k * self.dilation[axis])
            .checked_sub(self.pad[axis])
            .filter(|i| *i < self.input[axis])
    }
}
