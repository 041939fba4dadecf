//! Packets for the kernel's own network stack.

/// How a port gives packets to the kernel's network stack: what a rule's `kernel` can mean there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToKernel {
    /// Not at all, for this reason.
    No(&'static str),
    /// The kernel gets every frame as it came in, whatever the program does with its copy: the packet ends here. What was changed
    /// before cannot be given.
    Beside,
    /// What is sent by the port is received by the kernel.
    Back,
    /// Some rules are decided in front of the port ([`Device::set_rules`](super::Device::set_rules)), and packets that software
    /// decides can be put into the kernel's receive path, one system call each ([`Device::inject`](super::Device::inject)).
    InFront,
    /// Only rules that are decided in front of the port; the reason.
    InFrontOnly(&'static str),
}

impl ToKernel {
    /// Whether rules are decided in front of the port.
    pub fn in_front(self) -> bool {
        matches!(self, Self::InFront | Self::InFrontOnly(_))
    }
}

/// A rule with the action `kernel`, and whether the device decides it before packets reach the port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRule {
    /// Place of the rule in the list that was given.
    pub rule: usize,
    /// What stands in the way, if something does.
    pub decided: Result<(), String>,
}
