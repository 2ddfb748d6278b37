//! A network that takes latents, a timestep and conditions: a denoiser or a ControlNet.

use super::{
    Result,
    divided::{EarlyPiece, Pieces, pieces},
    inputs::{Layout, Role},
    network::{InputShapes, Network, Opener, Piece, tensor},
    parts::Part,
};
use crate::text::condition::Condition;
use sdrun::{Shapes, Tensors, abi::DType};

/// Values of inputs that stay the same, by role and size of the input.
pub(super) type Fixed<'f> = Box<dyn Fn(Role, usize) -> Option<Vec<f32>> + 'f>;

/// A run to come: its conditions, as indices, and its time.
pub(super) type Run = (Vec<usize>, f64);

/// Such a network, about to be loaded. What its runs share is already computed.
pub(super) struct Prepared<'a> {
    open: &'a Opener<'a>,
    layout: Layout,
    roles: Vec<(String, Role)>,
    fixed: Fixed<'a>,
    early: Option<Early<'a>>,
    main: Piece<'a>,
    shapes: InputShapes,
    /// Names and shapes of the outputs; no shape if it depends on the prompt.
    pub(super) outputs: Vec<(String, Option<Vec<usize>>)>,
}

/// Such a network, with the inputs of its next run.
pub(super) struct Fed<'a> {
    pub(super) network: Network<'a>,
    inputs: Inputs,
    early: Option<Early<'a>>,
}

/// The inputs of a network's next run.
struct Inputs {
    layout: Layout,
    roles: Vec<(String, Role)>,
    tensors: Tensors,
    /// The conditions in `tensors`, as indices.
    rows: Vec<usize>,
}

/// What depends on the conditions, or on them and the time, alone.
struct Early<'a> {
    open: &'a Opener<'a>,
    piece: EarlyPiece<'a>,
    inputs: Inputs,
    /// Loaded only while it is needed.
    network: Option<Network<'a>>,
    /// Names, types and shapes of its outputs.
    outputs: Vec<(String, DType, Vec<usize>)>,
    /// How many runs' outputs are kept.
    most: usize,
    /// Its outputs, the oldest first. Those of `shown` are in the network's inputs instead.
    known: Vec<(Moment, Tensors)>,
    shown: Option<Moment>,
}

/// Conditions, as indices, and the time if it matters.
type Moment = (Vec<usize>, Option<u64>);

impl<'a> Prepared<'a> {
    /// Computes what the runs in `upcoming` share. Their conditions are indices into `all`. `residuals` has the shapes of inputs that a
    /// ControlNet fills.
    pub(super) fn new(
        open: &'a Opener<'a>,
        part: &'a Part,
        layout: Layout,
        all: &[Condition],
        residuals: &Shapes,
        fixed: Fixed<'a>,
        upcoming: &[Run],
    ) -> Result<Self> {
        let (roles, shapes) = layout.inputs(part, all, residuals)?;
        let Pieces { early, main, shapes, outputs } = pieces(part, &roles, shapes)?;
        let early = match early {
            Some(piece) => Some(Early::new(open, piece, (layout, &roles), all, &fixed, upcoming)?),
            None => None,
        };
        Ok(Prepared { open, layout, roles, fixed, early, main, shapes, outputs })
    }

    /// Loads it.
    pub(super) fn load(self) -> Result<Fed<'a>> {
        let Prepared { open, layout, roles, fixed, early, main, shapes, .. } = self;
        let network = open.network(main, shapes)?;
        let inputs = Inputs::new(&network, layout, &roles, &fixed)?;
        Ok(Fed { network, inputs, early })
    }
}

impl Fed<'_> {
    /// Sets the input `name`.
    pub(super) fn set_named(&mut self, name: &str, values: &[f32]) -> Result<()> {
        self.inputs.tensors.insert(name.into(), self.network.input(name, values)?);
        Ok(())
    }

    /// Runs the network for the conditions `rows` of `all`, which are as many as its batch and of one length, and returns the named
    /// outputs.
    pub(super) fn run(
        &mut self,
        all: &[Condition],
        rows: &[usize],
        latents: &[f32],
        time: f64,
        outputs: &[&str],
    ) -> Result<Vec<Vec<f32>>> {
        if let Some(early) = &mut self.early {
            early.show(all, rows, time, &mut self.inputs.tensors)?;
        }
        self.inputs.condition(&self.network, all, rows)?;
        self.inputs.set(&self.network, Role::Time, &[time as f32])?;
        self.inputs.set(&self.network, Role::Latents, latents)?;
        self.network.run(&self.inputs.tensors, outputs)
    }
}

impl Inputs {
    /// Inputs of a network that takes some of those in `roles`.
    fn new(
        network: &Network<'_>,
        layout: Layout,
        roles: &[(String, Role)],
        fixed: &Fixed<'_>,
    ) -> Result<Self> {
        let roles: Vec<_> = roles.iter().filter(|(name, _)| network.takes(name)).cloned().collect();
        let mut tensors = Tensors::new();
        for (name, role) in &roles {
            let values = match role {
                Role::Text | Role::TextIds | Role::Mask => None,
                role => fixed(*role, network.shape(name)?.iter().product()),
            };
            if let Some(values) = values {
                tensors.insert(name.clone(), network.input(name, &values)?);
            }
        }
        Ok(Inputs { layout, roles, tensors, rows: Vec::new() })
    }

    /// Fills the inputs of this role with repetitions of `values`.
    fn set(&mut self, network: &Network<'_>, role: Role, values: &[f32]) -> Result<()> {
        for (name, _) in self.roles.iter().filter(|(_, own)| *own == role) {
            let size: usize = network.shape(name)?.iter().product();
            let values = values.repeat(size / values.len().max(1));
            self.tensors.insert(name.clone(), network.input(name, &values)?);
        }
        Ok(())
    }

    /// Puts conditions into the inputs.
    fn condition(&mut self, network: &Network<'_>, all: &[Condition], rows: &[usize]) -> Result<()> {
        if self.rows == rows {
            return Ok(());
        }
        let chosen: Vec<&Condition> = rows.iter().filter_map(|index| all.get(*index)).collect();
        let Some(first) = chosen.first() else { return Ok(()) };
        for (name, role) in &self.roles {
            let shape = self.layout.shape(*role, first);
            let of = |condition: &Condition| -> Option<Vec<f32>> {
                match role {
                    Role::Text => Some(condition.hidden.clone()),
                    Role::Pooled => condition.pooled.clone(),
                    Role::Sizes => condition.time_ids.clone(),
                    _ => None,
                }
            };
            let values = match role {
                Role::TextIds => Some(vec![0.0; shape.iter().product()]),
                Role::Mask => Some(vec![1.0; shape.iter().product()]),
                _ => chosen.iter().map(|row| of(row)).collect::<Option<Vec<_>>>().map(|rows| rows.concat()),
            };
            if let Some(values) = values {
                self.tensors.insert(name.clone(), network.input_of(name, shape, &values)?);
            }
        }
        self.rows = rows.to_vec();
        Ok(())
    }
}

impl<'a> Early<'a> {
    fn new(
        open: &'a Opener<'a>,
        piece: EarlyPiece<'a>,
        (layout, roles): (Layout, &[(String, Role)]),
        all: &[Condition],
        fixed: &Fixed<'_>,
        upcoming: &[Run],
    ) -> Result<Self> {
        let (outputs, most) = (piece.outputs(), piece.most());
        let network = open.network(piece.piece.clone(), piece.shapes.clone())?;
        let inputs = Inputs::new(&network, layout, roles, fixed)?;
        let mut early = Early {
            open,
            piece,
            inputs,
            network: Some(network),
            outputs,
            most,
            known: Vec::new(),
            shown: None,
        };
        for (rows, time) in upcoming {
            if early.known.len() < most {
                early.know(all, rows, *time)?;
            }
        }
        // The rest of the network may need its memory.
        early.network = None;
        Ok(early)
    }

    /// Computes the outputs for these conditions and this time if they are not known, and returns their place.
    fn know(&mut self, all: &[Condition], rows: &[usize], time: f64) -> Result<usize> {
        let moment = (rows.to_vec(), self.piece.by_step.then(|| time.to_bits()));
        if let Some(at) = self.known.iter().position(|(known, _)| *known == moment) {
            return Ok(at);
        }
        let network = match &mut self.network {
            Some(network) => network,
            // From now on it stays, because the sampler uses other times than those that were expected.
            none => none.insert(self.open.network(self.piece.piece.clone(), self.piece.shapes.clone())?),
        };
        self.inputs.condition(network, all, rows)?;
        self.inputs.set(network, Role::Time, &[time as f32])?;
        let names: Vec<&str> = self.outputs.iter().map(|(name, ..)| name.as_str()).collect();
        let values = network.run(&self.inputs.tensors, &names)?;
        let named = self.outputs.iter().zip(values).map(|((name, dtype, shape), values)| {
            Ok((name.clone(), tensor(*dtype, shape.clone(), &values)?))
        });
        let tensors = named.collect::<Result<Tensors>>()?;
        if self.known.len() >= self.most
            && let Some(oldest) = self.known.iter().position(|(known, _)| self.shown.as_ref() != Some(known))
        {
            self.known.remove(oldest);
        }
        self.known.push((moment, tensors));
        Ok(self.known.len() - 1)
    }

    /// Moves the outputs for these conditions and this time into the inputs of the network.
    fn show(&mut self, all: &[Condition], rows: &[usize], time: f64, inputs: &mut Tensors) -> Result<()> {
        let at = self.know(all, rows, time)?;
        let moment = self.known[at].0.clone();
        if self.shown.as_ref() == Some(&moment) {
            return Ok(());
        }
        if let Some((_, tensors)) =
            self.known.iter_mut().find(|(known, _)| Some(known) == self.shown.as_ref())
        {
            for (name, ..) in &self.outputs {
                tensors.extend(inputs.remove_entry(name));
            }
        }
        inputs.append(&mut self.known[at].1);
        self.shown = Some(moment);
        Ok(())
    }
}
