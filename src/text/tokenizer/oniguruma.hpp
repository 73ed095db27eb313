// Regular expressions as the package tokenizers reads them (Oniguruma, Ruby's syntax), for PCRE2.
#pragma once

#include <string>
#include <string_view>

namespace capstan::data {

// An expression for PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE that finds the same. Throws ErrorCode::unsupported, with the
// place, for what PCRE2 would read in another way. What is wrong in both is left to PCRE2 to say.
std::string pcre2_of_oniguruma(std::string_view regex);

}  // namespace capstan::data
