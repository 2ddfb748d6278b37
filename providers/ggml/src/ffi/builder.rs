//! A ggml compute graph under construction.

use super::{
    api::*,
    custom::{Cell, Failure, Shares, trampoline},
    kernel::{Kernel, MAX_INPUTS},
    library::Target,
    room::Home,
    store::{Pools, Store, Stored},
    tensor::{Context, Extent, Strides, Tensor, Type, check, count, new_tensor, reserve, signed},
};
use sdrun_abi::Result;
use std::{
    collections::{HashMap, HashSet},
    ffi::c_int,
    sync::{Arc, OnceLock, atomic::AtomicBool},
};

/// ggml's element-wise functions of one f32 tensor. `Gelu` and `GeluQuick` are for devices only, because ggml looks them up in f16
/// tables on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Unary {
    Abs,
    Cos,
    Elu,
    Exp,
    /// The tanh approximation.
    Gelu,
    GeluErf,
    /// `x * sigmoid(1.702 x)`.
    GeluQuick,
    HardSwish,
    Log,
    Neg,
    Relu,
    Sigmoid,
    Silu,
    Sin,
    Sqr,
    Sqrt,
    Tanh,
}

/// ggml's element-wise functions of two f32 tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
}

impl Binary {
    /// Whether the operands may be swapped.
    pub(crate) fn commutes(self) -> bool {
        matches!(self, Binary::Add | Binary::Mul)
    }
}

/// The approximate rate of one core in matrix products.
pub(super) const MULTIPLICATIONS_PER_NS: usize = 32;

/// Builds a graph. Every function that adds a node checks the conditions that ggml would assert.
pub(crate) struct Builder {
    pub(super) target: Target,
    /// The tensors, by index.
    pub(super) tensors: Vec<TensorPtr>,
    /// Contexts of the nodes.
    pub(super) contexts: Vec<Context>,
    /// Contexts of the constants in main memory and on the device. Constants have memory of their own.
    pub(super) constants: [Vec<Context>; 2],
    pub(super) inputs: Vec<Tensor>,
    /// The store whose tensors the graph reads.
    pub(super) pools: Option<Arc<Pools>>,
    /// Boxed, because ggml keeps pointers to them.
    #[allow(clippy::vec_box)]
    pub(super) kernels: Vec<Box<Cell>>,
    pub(super) failure: Arc<Failure>,
    /// The approximate time of the nodes on one thread, in nanoseconds.
    pub(super) work: usize,
    pub(super) nodes: usize,
    /// The index in `kernels` of the kernel that a node runs.
    pub(super) cells: HashMap<TensorPtr, usize>,
    /// Nodes that the GPU runs.
    pub(super) device_nodes: HashSet<TensorPtr>,
}

// SAFETY: only this value owns the memory behind the pointers.
unsafe impl Send for Builder {}

impl Drop for Builder {
    fn drop(&mut self) {
        for context in self.contexts.iter().chain(self.constants.iter().flatten()) {
            // SAFETY: made by `ggml_init`, freed once.
            unsafe { (self.target.ggml.api.ggml_free)(context.raw) };
        }
    }
}

impl Builder {
    /// An empty graph.
    pub(crate) fn new(target: Target) -> Self {
        let failure = Arc::new(Failure::default());
        Builder {
            target,
            tensors: Vec::new(),
            contexts: Vec::new(),
            constants: Default::default(),
            inputs: Vec::new(),
            pools: None,
            kernels: Vec::new(),
            failure,
            work: 0,
            nodes: 0,
            cells: HashMap::new(),
            device_nodes: HashSet::new(),
        }
    }

    /// Whether several threads are faster than one. Starting them takes about 0.1 ms, and they wait for each other after every
    /// node.
    pub(crate) fn is_worth_threads(&self) -> bool {
        self.work > 100_000 + 2_000 * self.nodes
    }

    /// The kernel that a node runs.
    pub(super) fn cell(&self, node: TensorPtr) -> Option<&Cell> {
        self.cells.get(&node).map(|index| &*self.kernels[*index])
    }

    // ---- tensors without operation ----

    /// A tensor with its own memory, filled before the first run.
    pub(crate) fn constant(&mut self, type_: Type, extent: Extent, home: Home) -> Result<Tensor> {
        let contexts = &mut self.constants[usize::from(home == Home::Device)];
        let context = reserve(self.target.ggml, contexts)?;
        let raw = new_tensor(self.target.ggml, context, type_, extent)?;
        Ok(self.register(raw))
    }
    /// A tensor of `store`. A graph can use only one store.
    pub(crate) fn stored(&mut self, store: &Store, tensor: Stored) -> Result<Tensor> {
        let pools = self.pools.get_or_insert_with(|| store.pools().clone());
        check(Arc::ptr_eq(pools, store.pools()), "stored", "all weights in one store")?;
        Ok(self.register(store.raw(tensor)))
    }
    /// A tensor that is filled before each run.
    pub(crate) fn input(&mut self, type_: Type, extent: Extent) -> Result<Tensor> {
        let context = reserve(self.target.ggml, &mut self.contexts)?;
        let raw = new_tensor(self.target.ggml, context, type_, extent)?;
        let tensor = self.register(raw);
        // SAFETY: a tensor of this builder.
        unsafe { (self.target.ggml.api.ggml_set_input)(self.raw(tensor)) };
        self.inputs.push(tensor);
        Ok(tensor)
    }

    // ---- views ----

    /// The same elements under another extent.
    pub(crate) fn reshape(&mut self, a: Tensor, extent: Extent) -> Result<Tensor> {
        check(self.is_contiguous(a), "reshape", "a contiguous tensor")?;
        check(count(extent)? == self.len(a), "reshape", "as many elements as before")?;
        check(extent[0].is_multiple_of(self.type_of(a).block()), "reshape", "rows of whole blocks")?;
        if self.extent(a) == extent {
            return Ok(a);
        }
        let ne = signed(extent);
        self.view(|api, ctx, this| unsafe {
            // SAFETY: checked above.
            (api.ggml_reshape_4d)(ctx, this.raw(a), ne[0], ne[1], ne[2], ne[3])
        })
    }
    /// A contiguous run of the elements of `a` that begins at element `start`.
    pub(crate) fn run(&mut self, a: Tensor, start: usize, extent: Extent) -> Result<Tensor> {
        check(self.is_contiguous(a), "view", "a contiguous tensor")?;
        let len = count(extent)?;
        check(
            start.checked_add(len).is_some_and(|end| end <= self.len(a)),
            "view",
            "a run inside the tensor",
        )?;
        let size = self.type_of(a).size();
        let ne = signed(extent);
        let nb: Strides =
            [size * extent[0], size * extent[0] * extent[1], size * extent[0] * extent[1] * extent[2]];
        self.view(|api, ctx, this| unsafe {
            // SAFETY: checked above.
            (api.ggml_view_4d)(
                ctx,
                this.raw(a),
                ne[0],
                ne[1],
                ne[2],
                ne[3],
                nb[0],
                nb[1],
                nb[2],
                start * size,
            )
        })
    }

    // ---- arithmetic, all f32 ----

    /// `a op b`. `b` is repeated along dimensions in which the extent of `a` is a multiple of its own.
    pub(crate) fn binary(&mut self, op: Binary, a: Tensor, b: Tensor) -> Result<Tensor> {
        self.check_f32(&[a, b], "binary")?;
        let fits = self.extent(a).iter().zip(self.extent(b)).all(|(a, b)| a % b == 0);
        check(fits, "binary", "a second operand that can be repeated to the first")?;
        self.node(|api, ctx, this| {
            let function = match op {
                Binary::Add => api.ggml_add,
                Binary::Sub => api.ggml_sub,
                Binary::Mul => api.ggml_mul,
                Binary::Div => api.ggml_div,
            };
            // SAFETY: checked above.
            unsafe { function(ctx, this.raw(a), this.raw(b)) }
        })
    }
    /// An element-wise function.
    pub(crate) fn unary(&mut self, op: Unary, a: Tensor) -> Result<Tensor> {
        self.check_f32(&[a], "unary")?;
        self.node(|api, ctx, this| {
            let function = match op {
                Unary::Abs => api.ggml_abs,
                Unary::Cos => api.ggml_cos,
                Unary::Elu => api.ggml_elu,
                Unary::Exp => api.ggml_exp,
                Unary::Gelu => api.ggml_gelu,
                Unary::GeluErf => api.ggml_gelu_erf,
                Unary::GeluQuick => api.ggml_gelu_quick,
                Unary::HardSwish => api.ggml_hardswish,
                Unary::Log => api.ggml_log,
                Unary::Neg => api.ggml_neg,
                Unary::Relu => api.ggml_relu,
                Unary::Sigmoid => api.ggml_sigmoid,
                Unary::Silu => api.ggml_silu,
                Unary::Sin => api.ggml_sin,
                Unary::Sqr => api.ggml_sqr,
                Unary::Sqrt => api.ggml_sqrt,
                Unary::Tanh => api.ggml_tanh,
            };
            // SAFETY: a contiguous f32 tensor.
            unsafe { function(ctx, this.raw(a)) }
        })
    }
    /// `a` if positive, else `slope * a`.
    pub(crate) fn leaky_relu(&mut self, a: Tensor, slope: f32) -> Result<Tensor> {
        self.check_f32(&[a], "leaky_relu")?;
        // SAFETY: a contiguous f32 tensor.
        self.node(|api, ctx, this| unsafe { (api.ggml_leaky_relu)(ctx, this.raw(a), slope, false) })
    }
    /// `min(max(a, low), high)`.
    pub(crate) fn clamp(&mut self, a: Tensor, low: f32, high: f32) -> Result<Tensor> {
        self.check_f32(&[a], "clamp")?;
        // SAFETY: a contiguous f32 tensor.
        self.node(|api, ctx, this| unsafe { (api.ggml_clamp)(ctx, this.raw(a), low, high) })
    }
    /// `a * scale + bias`.
    pub(crate) fn scale(&mut self, a: Tensor, scale: f32, bias: f32) -> Result<Tensor> {
        self.check_f32(&[a], "scale")?;
        // SAFETY: a contiguous f32 tensor.
        self.node(|api, ctx, this| unsafe { (api.ggml_scale_bias)(ctx, this.raw(a), scale, bias) })
    }

    // ---- along dimension 0, all f32 ----

    /// Softmax.
    pub(crate) fn soft_max(&mut self, a: Tensor) -> Result<Tensor> {
        self.check_f32(&[a], "soft_max")?;
        // SAFETY: a contiguous f32 tensor.
        self.node(|api, ctx, this| unsafe { (api.ggml_soft_max)(ctx, this.raw(a)) })
    }
    /// Mean, keeping the dimension as 1.
    pub(crate) fn mean(&mut self, a: Tensor) -> Result<Tensor> {
        self.check_f32(&[a], "mean")?;
        // SAFETY: a contiguous f32 tensor.
        self.node(|api, ctx, this| unsafe { (api.ggml_mean)(ctx, this.raw(a)) })
    }
    /// Sum, keeping the dimension as 1.
    pub(crate) fn sum(&mut self, a: Tensor) -> Result<Tensor> {
        self.check_f32(&[a], "sum")?;
        // SAFETY: a contiguous f32 tensor.
        self.node(|api, ctx, this| unsafe { (api.ggml_sum_rows)(ctx, this.raw(a)) })
    }

    // ---- ours ----

    /// A node that runs one of our kernels on contiguous `inputs`. Error messages use `name`.
    pub(crate) fn custom(
        &mut self,
        name: &str,
        kernel: Box<dyn Kernel>,
        inputs: &[Tensor],
        type_: Type,
        extent: Extent,
    ) -> Result<Tensor> {
        check(inputs.len() <= MAX_INPUTS, "custom", "at most nine inputs")?;
        check(inputs.iter().all(|input| self.is_contiguous(*input)), "custom", "contiguous tensors")?;
        check(kernel.grid(1).len() == count(extent)?, "custom", "a grid that covers the output")?;
        self.work += kernel.multiplications() / MULTIPLICATIONS_PER_NS;
        let failure = self.failure.clone();
        let cell = Box::new(Cell {
            kernel,
            name: name.to_string(),
            inputs: inputs.len(),
            failure,
            shares: Shares::default(),
            grid: OnceLock::new(),
            over: AtomicBool::new(false),
        });
        let data: *const Cell = &*cell;
        self.kernels.push(cell);
        let ne = signed(extent);
        let tensor = self.node(|api, ctx, this| {
            let mut raw: Vec<TensorPtr> = inputs.iter().map(|input| this.raw(*input)).collect();
            let (pointer, len) = (raw.as_mut_ptr(), raw.len() as c_int);
            let (type_, data) = (type_ as c_int, data.cast_mut().cast());
            // SAFETY: `data` lives in `self.kernels` as long as the graph. -1 means "all threads".
            unsafe {
                (api.ggml_custom_4d)(
                    ctx, type_, ne[0], ne[1], ne[2], ne[3], pointer, len, trampoline, -1, data,
                )
            }
        })?;
        self.cells.insert(self.raw(tensor), self.kernels.len() - 1);
        Ok(tensor)
    }

    // ---- properties ----

    /// The element type.
    pub(crate) fn type_of(&self, tensor: Tensor) -> Type {
        // SAFETY: a tensor of this builder.
        let raw = unsafe { (*self.raw(tensor)).type_ };
        Type::from_raw(raw).unwrap_or_else(|| unreachable!("tensors are only made of known types"))
    }
    /// The elements of each dimension, the innermost first.
    pub(crate) fn extent(&self, tensor: Tensor) -> Extent {
        // SAFETY: a tensor of this builder.
        unsafe { (*self.raw(tensor)).ne.map(|n| n as usize) }
    }
    /// The number of elements.
    pub(crate) fn len(&self, tensor: Tensor) -> usize {
        self.extent(tensor).iter().product()
    }
    pub(super) fn is_contiguous(&self, tensor: Tensor) -> bool {
        // SAFETY: a tensor of this builder.
        let (ne, nb) = unsafe { ((*self.raw(tensor)).ne, (*self.raw(tensor)).nb) };
        let type_ = self.type_of(tensor);
        let mut dense = type_.size();
        (0..4).all(|i| {
            let fits = ne[i] == 1 || nb[i] == dense;
            dense = if i == 0 { type_.bytes(ne[0] as usize) } else { dense * ne[i] as usize };
            fits
        })
    }

    // ---- helpers ----

    pub(super) fn raw(&self, tensor: Tensor) -> TensorPtr {
        self.tensors[tensor.index()]
    }
    pub(super) fn check_f32(&self, tensors: &[Tensor], what: &str) -> Result<()> {
        let fits = tensors.iter().all(|t| self.type_of(*t) == Type::F32 && self.is_contiguous(*t));
        check(fits, what, "contiguous f32 tensors")
    }
    pub(super) fn node(&mut self, make: impl FnOnce(&Api, Ptr, &Self) -> TensorPtr) -> Result<Tensor> {
        let tensor = self.view(make)?;
        self.nodes += 1;
        self.work += self.len(tensor);
        Ok(tensor)
    }
    pub(super) fn view(&mut self, make: impl FnOnce(&Api, Ptr, &Self) -> TensorPtr) -> Result<Tensor> {
        let context = reserve(self.target.ggml, &mut self.contexts)?;
        let raw = make(&self.target.ggml.api, context, self);
        Ok(self.register(raw))
    }
    fn register(&mut self, raw: TensorPtr) -> Tensor {
        self.tensors.push(raw);
        Tensor::new(self.tensors.len() - 1)
    }
}
