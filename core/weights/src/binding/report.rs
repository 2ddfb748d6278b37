use sdrun_abi::DType;
use serde::Serialize;
use std::fmt;

/// The findings of [`Binding::infer`](super::Binding::infer).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// Weights bound by their own names.
    pub by_name: usize,
    /// Weights bound by the module path of the node that uses them.
    pub by_path: usize,
    /// Weights bound by their values alone, against or without a path.
    pub by_value: usize,
    /// Of those bound by name or path: how many have the value of that tensor in the reference.
    pub confirmed: usize,
    /// With a reference: weights bound by name or path whose value is nowhere in it. Either the graph was made from another
    /// checkpoint, or the exporter changed the values (batch normalisation folded into a convolution keeps the name of its
    /// weight in some exports).
    pub unconfirmed: Vec<String>,
    /// Initializers that are constants of the program, not weights. With a reference whose tensors were all found, these are
    /// all that remain.
    pub literals: Vec<String>,
    /// Weights that were not recognised. A refit keeps their values of the file.
    pub unbound: Vec<Unbound>,
    /// Weights whose name and value have different sources.
    pub contradictions: Vec<Contradiction>,
    /// Tensors of the reference that are in no weight of the graph.
    pub unused: Vec<String>,
}

/// A weight that was not recognised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unbound {
    /// Initializer name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Operators and names of the nodes that use it, at most three.
    pub used_by: Vec<String>,
    /// The reason.
    pub reason: Reason,
    /// Candidates; empty if there are none.
    pub candidates: Vec<String>,
}

/// Why a weight was not recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It has no name of its own and no node that uses it has a module path.
    NoPath,
    /// No rule covers this operand of this operator, or its shape.
    NoRule,
    /// It has the layout of a module's tensor but not its name, which exporters keep for unchanged tensors. Either something has
    /// been folded into it, usually batch normalisation, or it is a table that the exporter computed.
    Folded,
    /// The modules that use it would call it differently: tensors of equal value that the exporter merged, or ties.
    Merged,
    /// Several weights of different or unknown values would have one source.
    OneSourceTwice,
    /// Its length contradicts that of its module's other tensor.
    Shape,
    /// Several tensors of the reference have its value.
    EqualValues,
    /// The reference has no tensor of this name and none of this value.
    NotInReference,
}

/// A weight whose name and value have different sources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Contradiction {
    /// Initializer name.
    pub name: String,
    /// By name or path.
    pub by_name: String,
    /// By value. A single one was taken; with several, the weight is unbound.
    pub by_value: Vec<String>,
}

impl ImportReport {
    /// Weights that were bound.
    pub fn bound(&self) -> usize {
        self.by_name + self.by_path + self.by_value
    }
    /// Whether every weight was bound without contradiction.
    pub fn is_complete(&self) -> bool {
        self.unbound.is_empty() && self.contradictions.is_empty()
    }
}

impl fmt::Display for ImportReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} weights recognised: {} by name, {} by path, {} by value",
            self.bound(),
            self.bound() + self.unbound.len(),
            self.by_name,
            self.by_path,
            self.by_value
        )?;
        let rest = [
            (self.unconfirmed.len(), "not in the reference"),
            (self.contradictions.len(), "contradictory"),
            (self.literals.len(), "literals"),
        ];
        for (count, what) in rest.iter().filter(|(count, _)| *count > 0) {
            write!(f, ", {count} {what}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::NoPath => "it has lost its name, and the nodes that use it carry no module path",
            Reason::NoRule => "it has lost its name, and such an operand is no known weight of a module",
            Reason::Folded => "it has lost its name though not its layout: the exporter has folded another operation into it, or computed it",
            Reason::Merged => "modules that use it would call it differently",
            Reason::OneSourceTwice => "another weight would be the same tensor",
            Reason::Shape => "its length contradicts that of its module's other tensor",
            Reason::EqualValues => "several tensors of the reference have its value",
            Reason::NotInReference => "the reference has neither its name nor its value",
        })
    }
}
