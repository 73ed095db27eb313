// Tests the words and variables of shell scripts: expanded values, unknown values, and the origin of each
// byte.
#include <doctest/doctest.h>

#include "base/error.hpp"
#include "importers/shell_words.hpp"

using namespace capstan;
using namespace capstan::importers;

namespace {

// Prints the last command with its words in brackets; the reason follows an unknown word.
std::string last(std::string_view text) {
  const ShellScript script = read_shell(text);
  std::string result;
  if (script.commands.empty()) return "nothing";
  for (const ShellWord& word : script.commands.back()) {
    CHECK(word.text.size() == word.offsets.size());
    result += "[" + word.text + "]" + (word.unknown_reason.empty() ? "" : "?");
  }
  return result;
}

}  // namespace

TEST_CASE("words: quotes, continued lines and comments") {
  CHECK(last("run a 'b c' \"d e\" f\\ g") == "[run][a][b c][d e][f g]");
  CHECK(last("run --x \\\n  1 # a comment with 'quotes\n") == "[run][--x][1]");
  CHECK(last("run a#b '#c' \"\" ''") == "[run][a#b][#c][][]");
  CHECK(last("run \"a\\\"b\\\\c\\n\" 'a\\b'") == "[run][a\"b\\c\\n][a\\b]");
  CHECK(last("first; second && third | fourth") == "[fourth]");
  CHECK(last("run \"two\\\n words\"") == "[run][two words]");
  CHECK(last("") == "nothing");
  CHECK(last("A=1\nexport B=2") == "nothing");
}

TEST_CASE("variables: texts, lists and defaults") {
  CHECK(last("A=7; run $A ${A} x${A}y '$A' \"$A\"") == "[run][7][7][x7y][$A][7]");
  CHECK(last("A=\"--x 1\n --y 2\"\nrun $A \"$A\"") == "[run][--x][1][--y][2][--x 1\n --y 2]");
  CHECK(last("A=(--x 1 # why\n '--y z')\nrun ${A[@]}") == "[run][--x][1][--y][z]");
  CHECK(last("A=(--x '1 2')\nrun \"${A[@]}\" \"${A[*]}\" $A") == "[run][--x][1 2][--x 1 2][--x]");
  CHECK(last("A=(a); A+=(b); run \"${A[@]}\"") == "[run][a][b]");
  CHECK(last("A=a; A+=b; run $A") == "[run][ab]");
  CHECK(last("run ${A:-5} ${A:-$B} ${A-x}") == "[run][5][$B]?[x]");
  CHECK(last("A=${1:-deep}; run $A $1") == "[run][deep][$1]?");
  CHECK(last("A=''; run ${A:-5} ${A-6}") == "[run][5]");
  CHECK(last("A=2; run ${A:-5} ${B:-${A}}") == "[run][2][2]");
  CHECK(last("declare -a A=(1 2)\nrun ${A[@]}") == "[run][1][2]");
  CHECK(last("A=1\nA=2\nrun $A") == "[run][2]");
}

TEST_CASE("values that only a shell could know stay as written and are marked") {
  CHECK(last("run $HOME $1 $(hostname -i) `date` $((1 + 2)) ${A##*/} ok") ==
        "[run][$HOME]?[$1]?[$(hostname -i)]?[`date`]?[$((1 + 2))]?[${A##*/}]?[ok]");
  // One unknown part does not make the rest of a variable unknown.
  CHECK(last("A=\"--nodes $N --lr 1e-4\"; run $A") == "[run][--nodes][$N]?[--lr][1e-4]");
  CHECK(last("N=$((2*4))\nrun --n $N --m 1") == "[run][--n][$((2*4))]?[--m][1]");
}

TEST_CASE("offsets lead to the assignment that contains the words") {
  const std::string text = "A=\"--lr 3\"\nrun $A";
  const ShellScript script = read_shell(text);
  REQUIRE(script.commands.size() == 1);
  REQUIRE(script.commands[0].size() == 3);
  CHECK(script.commands[0][1].begin == text.find("--lr"));
  CHECK(script.commands[0][2].begin == text.find('3'));
}

TEST_CASE("here documents are no commands, branches are reported") {
  CHECK(last("cat <<EOF > x\nit's --lr 1\nEOF\nrun b") == "[run][b]");
  CHECK(last("cat <<-'EOF'\n\tdon't\n\tEOF\nrun c") == "[run][c]");
  CHECK(read_shell("if [ $A ]; then B=1; fi\nrun").branches.size() == 1);
  CHECK(read_shell("run a b").branches.empty());
}

TEST_CASE("branches: one that the script's own words choose is read alone, all others are marked") {
  CHECK(last("A=1; if [ $A = 1 ]; then B=x; else B=y; fi; run $B") == "[run][x]");
  CHECK(last("A=2; if [ $A = 1 ]; then B=x; elif [[ $A == [2-3] ]]; then B=z; else B=y; fi; run $B") ==
        "[run][z]");
  CHECK(last("A=3; B=y\nif test $A -gt 4\nthen\n  B=x\nfi\nrun $B") == "[run][y]");
  CHECK(last("if ! [ -z \"\" ] || [ 1 -eq 1 ] && true; then B=x; fi; run $B") == "[run][x]");
  CHECK(last("A=b; case \"$A\" in a) B=1;; b | c) B=2 ;; *) B=3; esac; run $B") == "[run][2]");
  CHECK(last("case x in (a) B=1;; (*) B=3;; esac\nrun $B") == "[run][3]");
  CHECK(last("[ 1 = 2 ] && B=x || B=y; run $B") == "[run][y]");
  CHECK(last("if false; then if [ $Q ]; then B=1; fi; B=2; fi; B=${B:-7}; run $B") == "[run][7]");
  // Not decided.
  CHECK(last("if [ $A ]; then B=x; else B=y; fi; run $B ok") == "[run][y]?[ok]");
  CHECK(last("B=0; if grep -q x file; then B=x; fi; run $B") == "[run][x]?");
  CHECK(last("B=\"--a 1\"; if [ $A ]; then B+=\" --b 2\"; fi; run $B") == "[run][--a][1][--b]?[2]?");
  CHECK(last("B=\"--a 1\"; if [ $A ]; then B=\"$B --b 2\"; fi; run $B") == "[run][--a][1][--b]?[2]?");
  CHECK(last("B=(1); if [ $A ]; then B+=(2); fi; run ${B[@]} 3") == "[run][1][2]?[3]");
  CHECK(last("C=5; if [ $A ]; then B=$C; fi; run $B $C") == "[run][5]?[5]");
  CHECK(last("while read x; do B=1; done; run $B") == "[run][1]?");
  CHECK(last("I=9; for I in 1 2; do :; done; run $I") == "[run][$I]?");
  // A default replaces a value from outside, but it never decides a branch, even through other variables.
  CHECK(last("if [ \"${A:-1}\" = 1 ]; then B=x; else B=y; fi; run $B ${A:-1}") == "[run][y]?[1]");
  CHECK(last("A=${A:-1}; C=\"$A\"; if [[ $C = 1 ]]; then B=x; fi; run $B $C") == "[run][x]?[1]");
  CHECK(last("L=(0 ${A:-\"1 2\"}); if [ \"${L[*]}\" ]; then B=x; fi; run $B") == "[run][x]?");
  CHECK(last("if [ -z \"${A:-}\" ]; then B=x; fi; run $B") == "[run][x]?");
  CHECK(last("if [ -z ${A:-} ]; then B=x; fi; run $B") == "[run][x]?");
  CHECK(last("A=${A:-}; if [ -z \"$A\" ]; then B=x; fi; run $B") == "[run][x]?");
  CHECK(last("if ${A:-false}; then B=x; fi; run $B") == "[run][x]?");
  CHECK(last("case ${A:-a} in a) B=1;; *) B=2;; esac; run $B") == "[run][2]?");
  CHECK(last("case ${A:-} in a) B=1;; '') B=2;; esac; run $B") == "[run][2]?");
  CHECK(last("A=1; if [ ${A:-2} = 1 ]; then B=x; fi; run $B") == "[run][x]");
  CHECK(last("A=; if [ ${A:-2} = 2 ]; then B=x; fi; run $B") == "[run][x]");
  const ShellScript by_default = read_shell("A=${A:-${1:-7b}}; if [ $A = 7b ]; then B=x; fi; run $B");
  REQUIRE(by_default.branches.size() == 1);
  CHECK(by_default.branches[0].variables == std::vector<std::string>{"A", "1"});
  CHECK(by_default.branches[0].defaults == std::map<std::string, std::string>{{"1", "7b"}, {"A", "7b"}});
  // From outside.
  const auto given = [](const std::string& text, const std::map<std::string, std::string>& variables) {
    const ShellScript script = read_shell(text, variables);
    CHECK(script.branches.empty());
    return script.commands.back().back().text;
  };
  CHECK(given("if [ \"$1\" = 7b ]; then B=x; else B=y; fi; run $B", {{"1", "7b"}}) == "x");
  CHECK(given("A=${A:-1}; if [ $A = 2 ]; then B=x; fi; run $B", {{"A", "2"}}) == "x");
  const ShellScript open = read_shell("if [ \"$SIZE\" = 7b ] && [ $1 ]; then B=x; fi; run $B");
  REQUIRE(open.branches.size() == 1);
  CHECK(open.branches[0].text == "if [ \"$SIZE\" = 7b ] && [ $1 ]");
  CHECK(open.branches[0].variables == std::vector<std::string>{"SIZE", "1"});
  CHECK(open.branches[0].assigns);
  CHECK(open.branch_of == std::vector<size_t>{0});
}

TEST_CASE("branches: one that empties or unsets a variable marks the text that it removes") {
  for (const char* branch : {"if [ $A ]; then B=; fi",
                             "if [ $A ]; then B=\"\"; fi",
                             "if [ $A ]; then B=' '; fi",
                             "E=; if [ $A ]; then B=$E; fi",
                             "if [ $A ]; then unset B; fi",
                             "if [ $A ]; then if true; then B=; fi; fi",
                             "if true; then if [ $A ]; then B=; fi; fi",
                             "if [ $A ]; then if [ $C ]; then B=; else unset B; fi; fi",
                             "if [ $A ]; then [ $C ] && B=; fi",
                             "if [ $A ]; then B=; elif [ $C ]; then B=; fi",
                             "if [ $A ]; then :; else B=; fi",
                             "case $A in 1) B=;; esac",
                             "case $A in 1) B=;; 2) unset B;; esac",
                             "[ $A ] && B=",
                             "[ $A ] || unset B",
                             "[ $A ] && { B=; C=1; }",
                             "[ $A ] && if true; then B=; fi",
                             "f() { B=; }; [ $A ] && f",
                             "f() { unset B; }; if [ $A ]; then f; fi",
                             "for I in 1 2; do B=; done"}) {
    CAPTURE(branch);
    CHECK(last("B='--x 1'; " + std::string(branch) + "; run $B ok") == "[run][--x]?[1]?[ok]");
    CHECK(last("L=(--x 1); B=\"${L[*]}\"; " + std::string(branch) + "; C=\"$B\"; run $C ok") ==
          "[run][--x]?[1]?[ok]");
    const ShellScript script = read_shell("B=0; " + std::string(branch) + "; run $B");
    REQUIRE(script.branches.size() == 1);
    CHECK(script.branches[0].assigns);
    // Not set before: the environment may set it.
    if (std::string(branch).find("unset") == std::string::npos)
      CHECK(last(std::string(branch) + "; run $B ok") == "[run][$B]?[ok]");
    // Empty before: empty on both sides.
    CHECK(last("B=; " + std::string(branch) + "; run $B ok") == "[run][ok]");
  }
  for (const char* branch :
       {"if [ $A ]; then L=(); fi", "[ $A ] && L=()", "[ $A ] && unset L", "case $A in 1) L=();; esac"}) {
    CAPTURE(branch);
    CHECK(last("L=(--x 1); " + std::string(branch) + "; run \"${L[@]}\" ok") == "[run][--x]?[1]?[ok]");
    CHECK(last("L=(); " + std::string(branch) + "; run \"${L[@]}\" ok") == "[run][ok]");
  }
  // One side sets it, the other one empties it.
  for (const char* branches :
       {"if [ $A ]; then B=--x; else B=; fi", "if [ $A ]; then B=; else B=--x; fi",
        "[ $A ] && B=--x || B=", "case $A in 1) B=--x;; 2) B=;; *) unset B;; esac",
        "B=; if [ $A ]; then B=; B+=--x; fi", "if [ $A ]; then B=; B=\"$B --x\"; fi",
        "B=; [ $A ] && { B=; B=\"$B --x\"; }", "B=--x; [ $A ] && B= ; [ $A ] || B=",
        "B=--x; [ $A ] && B= || C=", "B=--x; [ $A ] || B= && C=", "[ $A ] && B= && B=--x || B="}) {
    CAPTURE(branches);
    CHECK(last(std::string(branches) + "; run $B ok") == "[run][--x]?[ok]");
  }
  // Empty on all sides, or decided.
  for (const char* branches :
       {"if [ $A ]; then B=; else B=; fi", "case $A in 1) B=;; 2) B=' ';; *) unset B;; esac",
        "if [ $A ]; then if [ $C ]; then B=; else B=; fi; else B=; fi",
        "if [ $A ]; then B=--y; B=; else B=; fi", "if [ $A ]; then B=--y; fi; B=", "if true; then B=; fi",
        "if false; then B=--y; else B=; fi", "true && B=", "[ $A ] && B= || B=",
        "[ $A ] && unset B || B=\"\"", "[ $A ] && [ $C ] && B= || B=' '", "[ $A ] || [ $C ] && B= || B="}) {
    CAPTURE(branches);
    CHECK(last("B=--x; " + std::string(branches) + "; run $B ok") == "[run][ok]");
  }
  CHECK(last("L=(--x); if [ $A ]; then L=(); else L=(); fi; run \"${L[@]}\" ok") == "[run][ok]");
  CHECK(last("if [ $A ]; then B=; run $B ok; fi") == "[run][ok]");
  // The script knows that a variable has no value after `unset`.
  CHECK(last("B=1; unset B; run $B ${B:-2} ${B-3} ok") == "[run][2][3][ok]");
  CHECK(last("B=1; unset B; if [ -z \"$B\" ]; then C=x; fi; B=4; run $C $B") == "[run][x][4]");
  CHECK(last("unset B; [ $A ] && B=; run $B ok") == "[run][ok]");
  CHECK(last("[ $A ] && unset B; run $B ok") == "[run][$B]?[ok]");
  CHECK(last("unset -v B; B() { :; }; B=1; unset -f B; run $B") == "[run][1]");
  CHECK(last("L=(); run \"${L[@]}\" x\"${L[@]}\" \"${L[*]}\" \"\"") == "[run][x][][]");
  // A value that a command reads into the variable stays unknown.
  CHECK(last("B=; if [ $A ]; then B=1; read B; fi; run $B") == "[run][$B]?");
  // A condition that reads the variable depends on the same variables from outside.
  const ShellScript after = read_shell("B=x; [ $A ] && B=; if [ \"$B\" ]; then C=1; fi; run $C");
  REQUIRE(after.branches.size() == 2);
  CHECK(after.branches[1].variables == std::vector<std::string>{"A"});
}

TEST_CASE("lists: a command after `&&` or `||` is read only if the script decides the commands before it") {
  for (const char* condition :
       {"$USE", "((USE))", "(( ${USE:-0} == 1 ))", "nvidia-smi -L | grep -q H100", "command -v foo",
        "command -v foo &> /dev/null", "command -v foo >/dev/null 2>&1", "[ -f x ]", "cd x && grep -q a b",
        "OUT=$(nvidia-smi)", "( grep -q a b )", "{ cd x; grep -q a b; }", "! grep -q a b",
        "cat x | grep -q a", "[ \"$1\" ] && cd x", "[ $A ] &&\n  echo yes"}) {
    CAPTURE(condition);
    CHECK(last(std::string("L=12; ") + condition + " && L=24; run $L") == "[run][24]?");
    CHECK(last(std::string("L=12; ") + condition + " && { cd x; L=24; M=1; }; run $L $M") ==
          "[run][24]?[1]?");
    CHECK(last(std::string("L=12; ") + condition + " || L=24; run $L") == "[run][24]?");
    CHECK(last(std::string("L=12; ") + condition + " || { echo no; L=24; }; run $L ok") == "[run][24]?[ok]");
    // A subshell keeps its variables to itself.
    CHECK(last(std::string("L=12; ") + condition + " || (echo no; L=24); run $L ok") == "[run][12][ok]");
    CHECK(read_shell(std::string(condition) + " && run").branch_of.back() == 1);
    CHECK(last(std::string("if ") + condition + "; then L=24; fi; run $L") == "[run][24]?");
  }
  for (const char* success : {"A=1",
                              "export A=1",
                              "export PATH",
                              "cd /data",
                              "echo go",
                              "set -e",
                              "mkdir -p a b",
                              ":",
                              "true",
                              "module load cuda",
                              "source env.sh",
                              "((1))",
                              "((2 * (3 - 1) == 4 && !0))",
                              "A=7; ((A > 6))",
                              "[ 1 = 1 ]",
                              "{ cd x; }",
                              "(cd x)",
                              "echo a | tee b",
                              "grep -q x y || true",
                              "A=1 &&\n cd x"}) {
    CAPTURE(success);
    CHECK(last(std::string("L=12; ") + success + " && L=24; run $L") == "[run][24]");
    CHECK(last(std::string("L=12; ") + success + " || L=24; run $L") == "[run][12]");
  }
  CHECK(last("L=12; ((A = 3)) && L=24; A=${A:-7}; run $L") == "[run][24]?");
  CHECK(last("L=12; ((1 - 1)) && L=24; run $L") == "[run][12]");
  CHECK(last("A=2; ((A > 3)) && L=24 || L=6; run $L") == "[run][6]");
  CHECK(last("[ 1 = 2 ] && grep -q a b || L=6; run $L") == "[run][6]");
  // Later commands do not depend on a list that has ended.
  CHECK(last("[ $A ] && grep -q a b; L=6; run $L") == "[run][6]");
  CHECK(last("[ $A ] && { if [ $B ]; then L=1; fi; M=2; }; N=3; run $M $N") == "[run][2]?[3]");
  // Variables that arithmetic, `read` and `let` change are unknown.
  for (const char* change :
       {"((N = 24))", "((N++))", "((--N))", "((N *= 2))", "((N += 2))", "((N |= 2))", "((N &= 2))",
        "((N ^= 2))", "((N <<= 2))", "((N >>= 2))", "read N", "let N=24", "unset N[1]"}) {
    CAPTURE(change);
    CHECK(last(std::string("N=1; ") + change + "; run $N") == "[run][$N]?");
  }
  // Comparisons change none.
  for (const char* compares : {"((N == 1))", "((N != 1))", "((N <= 1))", "((N >= 1))", "((N | 2))",
                               "((N || 2))", "((N & 2))", "((N ^ 2))", "((N << 2))"}) {
    CAPTURE(compares);
    CHECK(last(std::string("N=1; ") + compares + "; run $N") == "[run][1]");
  }
  // A number with a leading zero is octal in arithmetic, and decimal in `[ … ]`.
  CHECK(last("L=12; ((010 == 10)) && L=24; run $L") == "[run][24]?");
  CHECK(last("L=12; A=010; ((A == 8)) && L=24; run $L") == "[run][24]?");
  CHECK(last("L=12; [[ 010 -eq 8 ]] && L=24; run $L") == "[run][24]?");
  CHECK(last("L=12; [[ -010 -lt 0 ]] && L=24; run $L") == "[run][24]?");
  CHECK(last("L=12; [ 010 -eq 10 ] && L=24; run $L") == "[run][24]");
  CHECK(last("L=12; ((0 == 0 && 10 == 10)) && L=24; run $L") == "[run][24]");
  const ShellScript asked = read_shell("[ \"$A\" ] && (( ${B:-0} > C )) && L=24; run $L");
  REQUIRE(asked.branches.size() == 2);
  CHECK(asked.branches[1].text == "if [ \"$A\" ] && (( ${B:-0} > C ))");
  CHECK(asked.branches[1].variables == std::vector<std::string>{"A", "B", "C"});
  CHECK(asked.branches[1].assigns);
  const ShellScript given =
      read_shell("[ \"$A\" ] && (( ${B:-0} > C )) && L=24; run $L", {{"A", "x"}, {"B", "2"}, {"C", "1"}});
  CHECK(given.branches.empty());
  CHECK(given.commands.back().back().text == "24");
}

TEST_CASE("functions are read where they are called, with their arguments") {
  CHECK(last("L=12; f() { L=24; }; run $L") == "[run][12]");
  CHECK(last("L=12; f() { L=24; }; f; run $L") == "[run][24]");
  CHECK(last("L=12\nfunction f {\n  L=24  # it's\n}\n[ \"$1\" ] && f\nrun $L") == "[run][24]?");
  CHECK(last("L=12; f() { L=24; }; grep -q a b || f; run $L") == "[run][24]?");
  CHECK(last("f() { L=$1; if [ $1 = 3 ]; then M=$2; fi; }; f 3 4; run $L $M $1") == "[run][3][4][$1]?");
  CHECK(last("f() { g; }\ng() { L=5; }\nf\nrun $L") == "[run][5]");
  // As bash does it.
  for (const char* declaration : {"local L=24", "local -i L=24", "declare L=24", "typeset L=24",
                                  "local L; L=24", "local M L=24", "local L=24; local L=25"}) {
    CAPTURE(declaration);
    const std::string f = "f() { " + std::string(declaration) + "; echo $L; }; ";
    CHECK(last("L=12; " + f + "f; run $L") == "[run][12]");
    CHECK(last(f + "f; run $L") == "[run][$L]?");
    CHECK(last("unset L; " + f + "f; run $L ok") == "[run][ok]");
  }
  CHECK(last("L=12; f() { declare -g L=24; }; f; run $L") == "[run][24]");
  CHECK(last("L=12; declare L=24; run $L") == "[run][24]");
  for (const char* commands : {"(L=24)", "(L+=24)", "(unset L)", "(read L)", "( (L=24) )",
                               "(L=24; (L=25); L=26)", "if true; then (L=24); fi", "f() { L=24; }; (f)"})
    CHECK_MESSAGE(last("L=12; " + std::string(commands) + "; run $L") == "[run][12]", commands);
  CHECK(last("(L=24; run $L)") == "[run][24]");
  CHECK(last("(L=24; (L=25); run $L)") == "[run][24]");
  CHECK(last("L=1; (L=24); L=2; run $L") == "[run][2]");
  CHECK(last("(L=24); run $L") == "[run][$L]?");
  CHECK(last("L=12; f() { local L=24; run $L; }; f") == "[run][24]");
  CHECK(last("L=12; f() { local L; run $L ok; }; f") == "[run][ok]");
  CHECK(last("L=12; f() { local L=1; g; }; g() { L=24; }; f; run $L") == "[run][12]");
  CHECK(last("L=12; f() { local L=1; }; f; g() { L=24; }; g; run $L") == "[run][24]");
  CHECK(last("f() { f; L=5; f; }; f; run $L") == "[run][5]");
  CHECK(last("main() { run \"$1\"; }; main a") == "[run][a]");
  CHECK(last("ok() { cd x; }; ok && L=1; run $L") == "[run][1]");
  CHECK(last("has() { grep -q a b; }; has && L=1; run $L") == "[run][1]?");
  CHECK(last("if false; then f() { L=1; }; fi; f; run $L") == "[run][$L]?");
}

TEST_CASE("commands that may set variables are noted") {
  const ShellScript script =
      read_shell("source ./env.sh\nif false; then . other; fi\n. a/b; eval \"$X\"; read -r N M\nrun");
  std::vector<std::string> texts;
  for (const ShellUnread& unread : script.unread) texts.push_back(unread.text);
  CHECK(texts == std::vector<std::string>{"source ./env.sh", ". a/b", "eval \"$X\"", "read -r N M"});
  CHECK(script.unread[0].begin == 0);
}

TEST_CASE("branches: blocks that are not closed or do not fit cause neither endless loops nor errors") {
  for (const char* text : {"if",
                           "if [ a",
                           "case",
                           "case x in",
                           "case x in a",
                           "case x in a)",
                           "case x in a) b",
                           "for",
                           "for x",
                           "while",
                           "do",
                           "done",
                           "fi",
                           "esac",
                           "else x",
                           "then",
                           ";;",
                           "a ;; b",
                           "case $x in esac",
                           "case x in # c\n a) b;; # d\n esac",
                           "if a; done; run",
                           "case x in ) y ;; | ) z",
                           "[",
                           "[[ ]]",
                           "! !",
                           "&&",
                           "|| x",
                           "if [ $A ]; then\n#",
                           "}",
                           "{ a",
                           "( a",
                           "a )",
                           "f()",
                           "f() {",
                           "f() { }; f",
                           "f() ( a ); f",
                           "function",
                           "function f",
                           "function f() { f; } ; f",
                           "f() { fi; } } ); f; f",
                           "((a) b)",
                           "(( ( ))",
                           "(( 1 / 0 ))",
                           "a &&",
                           "a | | b",
                           "{ a && } && b"})
    CHECK_NOTHROW(read_shell(text));
}

TEST_CASE("damaged and hostile scripts are errors, not loops") {
  for (const char* text : {"run 'a", "run \"a", "run $(a", "((", "((1", "run ${a", "A=(a", "run `a",
                           "run ${A:-b", "run \"${A:-\"b"})
    CHECK_THROWS_AS(read_shell(text), Error);
  std::string bomb = "A=0123456789\n";
  for (int i = 0; i < 40; ++i) bomb += "A=$A$A\n";
  CHECK_THROWS_AS(read_shell(bomb), Error);
  std::string nested = "run ";
  for (int i = 0; i < 5000; ++i) nested += "${A:-";
  CHECK_THROWS_AS(read_shell(nested), Error);
  std::string blocks, calls = "f0() { run 0123456789; }\n";
  for (int i = 0; i < 5000; ++i) blocks += "{ ";
  CHECK_THROWS_AS(read_shell(blocks), Error);
  for (int i = 1; i < 40; ++i) {
    const std::string callee = " f" + std::to_string(i - 1) + "; ";
    calls += "f" + std::to_string(i) + "() {" + callee + callee + "}\n";
  }
  CHECK_THROWS_AS(read_shell(calls + "f39\n"), Error);
  CHECK(last("run a\\") == "[run][a]");
  CHECK(last("run $") == "[run][$]");
}
