use super::RuleId;

/// Why a change of rules was refused. Nothing of a refused change has happened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleTableError {
    /// Nothing has this id, or not any more.
    #[error("there is no rule {0}")]
    NoSuchRule(RuleId),
    /// [`super::RuleLimits::rules`] is reached.
    #[error("there are {limit} rules, which is the limit")]
    TooManyRules {
        /// The limit.
        limit: usize,
    },
    /// [`super::RuleLimits::masks`] is reached: every mask costs a look at another table for every packet of a new flow.
    #[error(
        "the rules of one direction compare {limit} different sets of bits, which is the limit; write the rule with a set that is in use"
    )]
    TooManyMasks {
        /// The limit.
        limit: usize,
    },
    /// More rules than [`super::RuleLimits::alike`] compare the same bits with the same values: of these only the first ever runs.
    #[error("{limit} rules have this pattern, which is the limit; only the first of them ever runs")]
    TooManyAlike {
        /// The limit.
        limit: usize,
    },
    /// [`super::RuleLimits::passing`] is reached: a worker has not moved on for a long time.
    #[error("{limit} rules that are gone may still be seen by a worker, which is the limit; it does not move on")]
    TooManyPassing {
        /// The limit.
        limit: usize,
    },
    /// Too many rules meet in the hash table of their mask. The hash is secret, so this does not happen by itself, nor by choice.
    #[error("the hash table of the rule's mask has no place for it")]
    Crowded,
    /// A rule was to be replaced by one of the other direction.
    #[error("a rule at {} cannot be replaced by one at {}", .from.name(), .to.name())]
    OtherDirection {
        /// The direction of the rule that is there.
        from: wirepath_pmd::flow::Direction,
        /// That of the other.
        to: wirepath_pmd::flow::Direction,
    },
}
