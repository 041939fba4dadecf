//! Punt path: packets from a port to the kernel's network stack.

/// Path of packets from a port to the kernel's network stack. It determines what the action `kernel` of a
/// rule does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelPunt {
    /// There is no path, for this reason.
    No(&'static str),
    /// The kernel gets every received frame, besides the program. The action `kernel` ends the program's
    /// copy; changes of that copy do not reach the kernel.
    Copy,
    /// The kernel receives the frames that the port transmits.
    Loopback,
    /// The XDP program passes packets of some rules before they reach the port
    /// ([`set_rules`](super::PuntToKernel::set_rules)).
    ///
    /// Packets of other rules are injected into the kernel's receive path, with one system call each
    /// ([`inject`](super::PuntToKernel::inject)).
    XdpPass,
    /// The XDP program passes packets of some rules, and others cannot be injected, for this reason.
    XdpPassOnly(&'static str),
}

/// Rule with the action `kernel`, and whether the device applies it before packets reach the port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRule {
    /// Index of the rule in the list that was given.
    pub rule: usize,
    /// `Ok` if the device applies the rule, else the reason why it cannot.
    pub decided: Result<(), String>,
}
