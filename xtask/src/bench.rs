use crate::workspace::Workspace;
use anyhow::{Result, bail};
pub(crate) fn run(_: &Workspace, _: &[&str]) -> Result<()> {
    bail!("later")
}
