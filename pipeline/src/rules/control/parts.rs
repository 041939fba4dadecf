//! Division of a long change of the rules into parts.

use crate::rules::RuleTableError;
use crate::runtime::ControlPlane;

/// Number of steps of a part, each of which handles one rule in a few microseconds.
const STEPS: usize = 256;

/// Called between the parts of a long change, so that the control thread can do other work. It must not change the
/// rules. The change is given up if it returns `false`.
pub type Meanwhile<'a> = dyn FnMut(&mut ControlPlane) -> bool + 'a;

/// Counts the steps of a change and calls [`Meanwhile`] between its parts.
pub(super) struct Parts<'a, 'm> {
    /// The control plane; `None` before the start.
    pub(super) plane: Option<&'a mut ControlPlane>,
    meanwhile: Option<&'a mut Meanwhile<'m>>,
    steps: usize,
}

impl<'a, 'm> Parts<'a, 'm> {
    /// Divides a change into parts.
    pub(super) fn new(plane: &'a mut ControlPlane, meanwhile: &'a mut Meanwhile<'m>) -> Self {
        Self { plane: Some(plane), meanwhile: Some(meanwhile), steps: 0 }
    }

    /// Makes a change without a division.
    pub(super) fn one(plane: Option<&'a mut ControlPlane>) -> Self {
        Self { plane, meanwhile: None, steps: 0 }
    }

    /// Must be called for each rule. An error means that the change must be undone.
    pub(super) fn step(&mut self) -> Result<(), RuleTableError> {
        self.steps += 1;
        if self.steps.is_multiple_of(STEPS)
            && let (Some(plane), Some(meanwhile)) = (&mut self.plane, &mut self.meanwhile)
            && !meanwhile(plane)
        {
            return Err(RuleTableError::GivenUp);
        }
        Ok(())
    }
}
