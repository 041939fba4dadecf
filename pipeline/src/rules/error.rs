use super::RuleId;

/// Reason why a change of the rules was refused. A refused change has no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleTableError {
    /// No rule has this id, or the rule was removed.
    #[error("there is no rule {0}")]
    NoSuchRule(RuleId),
    /// [`super::RuleLimits::rules`] is reached.
    #[error("the limit of {limit} rules is reached")]
    TooManyRules {
        /// The limit.
        limit: usize,
    },
    /// [`super::RuleLimits::masks`] is reached. Each mask adds a table lookup for every packet of a new flow.
    #[error("the limit of {limit} masks per direction is reached; use a set of bits that other rules compare")]
    TooManyMasks {
        /// The limit.
        limit: usize,
    },
    /// [`super::RuleLimits::duplicates`] is reached: too many rules compare the same bits with the same
    /// values. Only the first of them ever runs.
    #[error("the limit of {limit} rules with the same pattern is reached; only the first of them ever runs")]
    TooManyDuplicates {
        /// The limit.
        limit: usize,
    },
    /// [`super::RuleLimits::pending_removals`] is reached: a worker has made no progress for a long time.
    #[error("the limit of {limit} removed rules in use by a worker is reached; the worker makes no progress")]
    TooManyPendingRemovals {
        /// The limit.
        limit: usize,
    },
    /// Too many rules collide in the hash table of their mask. The hash seed is secret, so an attacker cannot
    /// cause this.
    #[error("too many rules collide in the hash table of this mask")]
    HashCollisions,
    /// The caller gave up a long change ([`super::Meanwhile`]).
    #[error("the change was given up, because the program stops")]
    GivenUp,
    /// The replacement rule has another direction than the rule that it replaces.
    #[error("a rule at {} cannot be replaced by one at {}", .from.name(), .to.name())]
    OtherDirection {
        /// Direction of the existing rule.
        from: wirepath_flow::Direction,
        /// Direction of the replacement.
        to: wirepath_flow::Direction,
    },
}
