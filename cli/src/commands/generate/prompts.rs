//! The prompts of the pictures.

use super::Args;
use sdrun_diffusion::pipeline::{Request, Result, Syntax, Wildcards, prompts_of};

/// Neighbouring pictures with the same prompts. One request draws them.
#[derive(Debug, PartialEq)]
pub(super) struct Group {
    pub(super) prompt: String,
    pub(super) negative: String,
    /// Number of its first picture, from 0.
    pub(super) first: usize,
    /// Number of its pictures.
    pub(super) count: usize,
}

/// The prompts of all pictures, with their choices made by the seed of each. Prompts of a picture (`--from`) have theirs already, and
/// diffusers has none.
///
/// Returns the first group and the others.
pub(super) fn groups(args: &Args, request: &Request) -> Result<(Group, Vec<Group>)> {
    let wildcards = args.wildcard_dir.as_deref().map(Wildcards::open).transpose()?;
    let syntax = request.syntax.or(request.like.map(Syntax::of)).unwrap_or_default();
    let chooses = wildcards.is_some() || syntax != Syntax::Plain;
    let own = |text: &Option<String>| text.clone().filter(|_| chooses);
    let (prompt, negative) = (own(&args.prompt), own(&args.negative_prompt));
    let of_picture = |number: usize| {
        let seed = request.seed.wrapping_add(number as u64);
        let [new, new_negative] = [&prompt, &negative].map(|text| text.as_deref().unwrap_or_default());
        let (new, new_negative) = prompts_of(new, new_negative, seed, wildcards.as_ref())?;
        Ok((
            prompt.as_ref().map_or(request.prompt.clone(), |_| new),
            negative.as_ref().map_or(request.negative.clone(), |_| new_negative),
        ))
    };
    let (prompt, negative) = of_picture(0)?;
    let first = Group { prompt, negative, first: 0, count: 1 };
    let others = (1..request.count).map(of_picture).collect::<Result<Vec<_>>>()?;
    Ok(grouped(first, others))
}

/// Groups of a picture and those that follow.
fn grouped(mut first: Group, others: Vec<(String, String)>) -> (Group, Vec<Group>) {
    let mut groups: Vec<Group> = Vec::new();
    for (number, (prompt, negative)) in others.into_iter().enumerate() {
        let last = groups.last_mut().unwrap_or(&mut first);
        if last.prompt == prompt && last.negative == negative {
            last.count += 1;
        } else {
            groups.push(Group { prompt, negative, first: number + 1, count: 1 });
        }
    }
    (first, groups)
}

#[cfg(test)]
mod tests {
    use super::{Group, grouped};

    fn group(prompt: &str, negative: &str, first: usize, count: usize) -> Group {
        Group { prompt: prompt.into(), negative: negative.into(), first, count }
    }

    #[test]
    fn neighbours_with_the_same_prompts_are_a_group() {
        let others = [("a", ""), ("b", ""), ("b", "x"), ("a", "")].map(|(a, b)| (a.into(), b.into()));
        assert_eq!(
            grouped(group("a", "", 0, 1), others.into()),
            (group("a", "", 0, 2), vec![group("b", "", 2, 1), group("b", "x", 3, 1), group("a", "", 4, 1)])
        );
        assert_eq!(grouped(group("a", "", 0, 1), vec![]), (group("a", "", 0, 1), vec![]));
    }
}
