//! A network that takes latents, a timestep and conditions: a denoiser or a ControlNet.

use super::{
    Result,
    inputs::{Layout, Role},
    network::{Network, Opener},
    parts::Part,
};
use crate::text::condition::Condition;
use sdrun::{Shapes, Tensors};

/// Such a network, with the inputs of its next run.
pub(super) struct Fed<'a> {
    pub(super) network: Network<'a>,
    layout: Layout,
    roles: Vec<(String, Role)>,
    inputs: Tensors,
    /// The conditions in `inputs`, as indices.
    current: Vec<usize>,
}

impl<'a> Fed<'a> {
    /// Loads it for runs with any of the conditions `all`. `residuals` has the shapes of inputs that a ControlNet fills. `fixed`
    /// receives a role and the size of an input, and returns its values if they stay the same.
    pub(super) fn open(
        open: &'a Opener<'a>,
        part: &'a Part,
        layout: Layout,
        all: &[Condition],
        residuals: &Shapes,
        fixed: impl Fn(Role, usize) -> Option<Vec<f32>>,
    ) -> Result<Self> {
        let (roles, shapes) = layout.inputs(part, all, residuals)?;
        let network = open.network(part, shapes)?;
        let mut inputs = Tensors::new();
        for (name, role) in &roles {
            let values = match role {
                Role::Text | Role::TextIds | Role::Mask => None,
                role => fixed(*role, network.shape(name)?.iter().product()),
            };
            if let Some(values) = values {
                inputs.insert(name.clone(), network.input(name, &values)?);
            }
        }
        Ok(Fed { network, layout, roles, inputs, current: Vec::new() })
    }

    /// Sets the input `name`.
    pub(super) fn set_named(&mut self, name: &str, values: &[f32]) -> Result<()> {
        self.inputs.insert(name.into(), self.network.input(name, values)?);
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
        self.condition(all, rows)?;
        let many = rows.len();
        for (name, role) in &self.roles {
            let values = match role {
                Role::Latents => latents.repeat(many),
                Role::Time => vec![time as f32; self.network.shape(name)?.iter().product()],
                _ => continue,
            };
            self.inputs.insert(name.clone(), self.network.input(name, &values)?);
        }
        self.network.run(&self.inputs, outputs)
    }

    /// Puts conditions into the inputs.
    fn condition(&mut self, all: &[Condition], rows: &[usize]) -> Result<()> {
        if self.current == rows {
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
                self.inputs.insert(name.clone(), self.network.input_of(name, shape, &values)?);
            }
        }
        self.current = rows.to_vec();
        Ok(())
    }
}
