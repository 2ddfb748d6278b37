//! The prompts of the pictures of a request.

use super::{Opened, Request, Resolved, Result, Syntax, Wildcards, prompts_of};

/// Neighbouring pictures with the same prompts. One request draws them.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The prompt, with its choices made.
    pub prompt: String,
    /// The negative prompt, with its choices made.
    pub negative: String,
    /// Number of its first picture, from 0.
    pub first: usize,
    /// Number of its pictures.
    pub count: usize,
}

/// The prompts of all pictures, with the choices of the prompt and the negative prompt made by the seed of each. Texts whose choices
/// were made before, such as those of a picture's metadata, are not in `has_choices`. diffusers has none.
///
/// Returns the first group and the others.
///
/// # Errors
/// As [`prompts_of`].
pub fn groups(
    request: &Request,
    has_choices: [bool; 2],
    wildcards: Option<&Wildcards>,
) -> Result<(Group, Vec<Group>)> {
    let syntax = request.syntax.or(request.like.map(Syntax::of)).unwrap_or_default();
    let chooses = wildcards.is_some() || syntax != Syntax::Plain;
    let texts = [&request.prompt, &request.negative];
    let of_picture = |number: usize| {
        let seed = request.seed.wrapping_add(number as u64);
        let own = |which: usize| if has_choices[which] && chooses { texts[which].as_str() } else { "" };
        let (prompt, negative) = prompts_of(own(0), own(1), seed, wildcards)?;
        let or = |which: usize, chosen: String| match has_choices[which] && chooses {
            true => chosen,
            false => texts[which].clone(),
        };
        Ok((or(0, prompt), or(1, negative)))
    };
    let (prompt, negative) = of_picture(0)?;
    let first = Group { prompt, negative, first: 0, count: 1 };
    let others = (1..request.count).map(of_picture).collect::<Result<Vec<_>>>()?;
    Ok(grouped(first, others))
}

impl Group {
    /// The part of `request` that draws these pictures. `opened` is open for their prompts.
    ///
    /// # Errors
    /// As [`Request::resolve`].
    pub fn resolve(&self, request: &Request, opened: &Opened) -> Result<Resolved> {
        let request = Request {
            prompt: opened.prompt.clone(),
            negative: self.negative.clone(),
            count: self.count,
            ..request.clone()
        };
        let mut resolved = request.resolve(&opened.parts)?;
        (resolved.seed, resolved.variation) =
            (resolved.seed_of(self.first), resolved.variation_of(self.first));
        Ok(resolved)
    }
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
